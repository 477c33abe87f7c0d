"""Partial rollout: what is unfinished when a batch is full goes back as far as it came, and is continued from its tokens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rollout.plugins import HERE
from tests.unit.rollout.support import WireServer, make_args, reply_of, run, serving
from vime.rollout.collect import mask_off_policy
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.engine_access import EngineAccess
from vime.rollout.vllm_rollout import generate_rollout_async
from vime.utils.types import Sample

Status = Sample.Status


class Engine:
    """Answers "n+0=" with "n0"; of prompt 1, which is long, only the first token until it is asked to go on."""

    def __init__(self, tokenizer: Any, version: str = "3") -> None:
        self.tokenizer, self.version = tokenizer, version
        self.aborted = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def abort(self) -> None:
        """What an engine does at /abort_requests; called from another thread."""
        self.loop.call_soon_threadsafe(self.aborted.set)

    async def answer(self, body: dict[str, Any]) -> Any:
        """One reply."""
        text = self.tokenizer.decode(body["token_ids"])
        prompt, _, said = text.partition("=")
        number = prompt.partition("+")[0]
        if number == "1" and not said:
            await self.aborted.wait()
            return reply_of(number, self.tokenizer, reason="abort", version=self.version)
        return reply_of(f"{number}0"[len(said) :], self.tokenizer, version=self.version)


@pytest.fixture
def flags(model_dir: Path, tmp_path: Path) -> dict[str, Any]:
    """Batches of four groups, five begun at a time."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"input": f"{n}+0=", "label": str(n)}) + "\n" for n in range(9)))
    return {
        "hf_checkpoint": str(model_dir),
        "prompt_data": str(file),
        "label_key": "label",
        "custom_rm_path": f"{HERE}.length_reward",
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 8,
        "over_sampling_batch_size": 5,
        "partial_rollout": True,
    }


async def two_steps(tokenizer: Any, flags: dict[str, Any]) -> tuple[WireServer, list[Any], list[Any]]:
    """(server, outputs of two steps at weight versions 3 and 4, the buffer between them)."""
    engine = Engine(tokenizer)
    async with serving(lambda body, _: engine.answer(body)) as server:
        access = EngineAccess(engine.abort)
        args = make_args(server.runtime | {"engine_access": access}, **flags)
        source = RolloutDataSourceWithBuffer(args)
        access.version = 3
        first = await generate_rollout_async(args, 3, source)
        waiting = RolloutDataSourceWithBuffer(args)
        waiting.load_state_dict(source.state_dict(), "memory")  # as a commit and a resume would
        between = waiting.get_samples(1)
        engine.version = "4"
        access.version = 4
        second = await generate_rollout_async(args, 4, source)
        return server, [first, second], between


def test_an_unfinished_group_is_continued_token_by_token_under_the_next_weights(tokenizer: Any, flags: dict[str, Any]) -> None:
    server, (first, second), (waiting,) = run(two_steps(tokenizer, flags))
    assert [group[0].group_index for group in first.samples] == [0, 2, 3, 4]
    assert first.metrics["rollout/given_back/partial"] == 1.0
    assert [(s.group_index, s.status, s.response, s.weight_versions) for s in waiting] == [(1, Status.ABORTED, "1", ["3"])] * 2
    assert [s.metadata["start_rollout_id"] for s in waiting] == [3, 3]
    group = second.samples[0]
    assert [(s.group_index, s.status, s.response, s.reward) for s in group] == [(1, Status.COMPLETED, "10<|im_end|>", 3.0)] * 2
    assert [s.weight_versions for s in group] == [["3", "4", "4"]] * 2
    assert [s.rollout_log_probs for s in group] == [[-0.5] * 3] * 2
    (continued,) = [r for r in server.requests if tokenizer.decode(r["token_ids"]) == "1+0=1"][:1]
    assert continued["token_ids"] == group[0].tokens[:5]
    assert continued["sampling_params"]["max_tokens"] == 7
    assert second.metrics["rollout/staleness/max"] == 1.0
    assert second.metrics["rollout/mixed_versions"] == 0.25


def test_off_policy_tokens_leave_the_loss_when_asked_for(tokenizer: Any, flags: dict[str, Any]) -> None:
    _, (first, second), _ = run(two_steps(tokenizer, flags | {"mask_offpolicy_in_partial_rollout": True}))
    assert [s.loss_mask for s in second.samples[0]] == [[0, 1, 1]] * 2
    assert all(s.loss_mask == [1, 1, 1] for group in second.samples[1:] for s in group)
    assert first.metrics["rollout/masked_off_policy_tokens"] == 0.0
    assert second.metrics["rollout/masked_off_policy_tokens"] == 2.0


def test_a_fan_out_that_was_cut_off_begins_anew(tokenizer: Any, flags: dict[str, Any]) -> None:
    _, _, (waiting,) = run(two_steps(tokenizer, flags | {"custom_generate_function_path": f"{HERE}.fan_out"}))
    assert [(s.group_index, s.status, s.tokens) for s in waiting] == [(1, Status.PENDING, [])] * 2


def test_work_that_returns_nothing_in_time_goes_back_as_it_was(tokenizer: Any, flags: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr("vime.rollout.collect.ABORT_SECONDS", 0.1)
    hangs = flags | {"custom_generate_function_path": f"{HERE}.never_returns", "over_sampling_batch_size": 5}

    async def one_step() -> Any:
        engine = Engine(tokenizer)
        async with serving(lambda body, _: engine.answer(body)) as server:
            args = make_args(server.runtime | {"engine_access": EngineAccess(engine.abort)}, **hangs)
            source = RolloutDataSourceWithBuffer(args)
            return await generate_rollout_async(args, 3, source), source

    output, source = run(one_step())
    assert output.metrics["rollout/given_back/unfinished"] == 1.0
    assert [(s.group_index, s.status, s.tokens) for s in source.buffer[0]] == [(1, Status.PENDING, [])] * 2


def test_tokens_of_other_versions_than_the_engines_are_masked_and_unknown_ones_kept() -> None:
    sample = Sample(tokens=[1, 2, 3, 4], response_length=3, weight_versions=["2", "", "3"], status=Status.COMPLETED)
    assert mask_off_policy([[sample]], 3) == 1.0
    assert sample.loss_mask == [0, 1, 1]
    sample = Sample(tokens=[1, 2, 3], response_length=2, weight_versions=["2", "2"], loss_mask=[0, 1], status=Status.COMPLETED)
    assert mask_off_policy([[sample]], None) == 0.0
    assert mask_off_policy([[sample]], 3) == 1.0
    assert sample.loss_mask == [0, 0]
