"""One sample and one group: what is generated, scored, counted as failed, and what ends the run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.unit.rollout.plugins import HERE
from tests.unit.rollout.support import make_args, reply_of, run, serving
from vime.errors import DataError, GenerationError, HookError, RewardError
from vime.rollout.generation import generate_and_rm_group
from vime.rollout.vllm_rollout import GenerateState, generate
from vime.utils.types import Sample

Status = Sample.Status


def group_of(count: int, prompt: Any = "2+2=", **fields: Any) -> list[Any]:
    """Pending samples of group 0."""
    return [Sample(group_index=0, index=index, prompt=prompt, label="4", **fields) for index in range(count)]


def generated(model_dir: Path, answer: Any, group: list[Any] | None = None, **flags: Any) -> tuple[list[Any], Any]:
    """The group as `generate_and_rm_group` leaves it, and the server."""

    async def work() -> tuple[list[Any], Any]:
        async with serving(answer) as server:
            chosen = {"rm_type": "exact", "rollout_max_response_len": 16} | flags
            args = make_args(server.runtime, hf_checkpoint=str(model_dir), **chosen)
            async with GenerateState(args).running() as state:
                return await generate_and_rm_group(args, group or group_of(2), dict(state.sampling_params)), server

    return run(work())


def test_a_sample_gets_tokens_log_probs_versions_text_status_and_reward(model_dir: Path, tokenizer: Any) -> None:
    group, server = generated(model_dir, lambda body, n: reply_of("4", tokenizer))
    sample = group[0]
    prompt = tokenizer.encode("2+2=", add_special_tokens=False)
    assert server.requests[0]["token_ids"] == prompt
    assert sample.tokens == [*prompt, *tokenizer.encode("4", add_special_tokens=False), tokenizer.eos_token_id]
    assert sample.response_length == 2
    assert sample.loss_mask == [1, 1]
    assert sample.rollout_log_probs == [-0.5, -0.5]
    assert sample.weight_versions == ["3", "3"]
    assert sample.response == "4<|im_end|>"
    assert sample.status is Status.COMPLETED
    assert sample.reward == 1.0


def test_chat_messages_are_rendered_with_the_generation_prompt(model_dir: Path, tokenizer: Any) -> None:
    _, server = generated(model_dir, lambda body, n: reply_of("4", tokenizer), group_of(1, [{"role": "user", "content": "2+2="}]))
    assert tokenizer.decode(server.requests[0]["token_ids"]) == "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"


def test_the_context_limit_bounds_what_is_asked_for(model_dir: Path, tokenizer: Any) -> None:
    answer = lambda body, n: reply_of("4", tokenizer)  # noqa: E731
    _, server = generated(model_dir, answer, rollout_max_context_len=10)
    assert server.requests[0]["sampling_params"]["max_tokens"] == 10 - 4
    group, server = generated(model_dir, answer, rollout_max_context_len=4)
    assert server.requests == []
    assert [sample.status for sample in group] == [Status.TRUNCATED] * 2


def test_a_generation_that_the_engine_cut_off_is_continued(model_dir: Path, tokenizer: Any) -> None:
    def answer(body: dict[str, Any], n: int) -> Any:
        return reply_of("ab", tokenizer, reason="abort", version="1") if n == 0 else reply_of("c", tokenizer, version="2")

    group, server = generated(model_dir, answer, group_of(1))
    assert group[0].response == "abc<|im_end|>"
    assert group[0].weight_versions == ["1", "1", "2", "2"]
    assert server.requests[1]["token_ids"] == group[0].tokens[:6]
    assert server.requests[1]["sampling_params"]["max_tokens"] == 16 - 2


def test_two_turns_of_a_plug_in_mask_the_tools_text(model_dir: Path, tokenizer: Any) -> None:
    group, _ = generated(model_dir, lambda body, n: reply_of("4", tokenizer), custom_generate_function_path=f"{HERE}.two_turns")
    sample = group[0]
    assert sample.loss_mask == [1, 1] + [0] * 8 + [1, 1]
    assert sample.weight_versions == ["3", "3"] + [""] * 8 + ["3", "3"]
    assert sample.effective_response_length == 4
    assert sample.metadata["evaluation"] is False


def test_a_plug_in_finds_the_rollouts_own_state_and_its_posts_count_against_the_limit(model_dir: Path, tokenizer: Any) -> None:
    async def answer() -> Any:
        await asyncio.sleep(0)
        return reply_of("4", tokenizer)

    flags = {"custom_generate_function_path": f"{HERE}.posts_itself", "vllm_server_concurrency": 2}
    group, server = generated(model_dir, lambda body, n: answer(), group_of(8), **flags)
    assert all(sample.metadata["same_state"] for sample in group)
    assert server.most_in_flight <= 2


def test_no_slot_is_held_while_tools_run(model_dir: Path, tokenizer: Any) -> None:
    barrier = asyncio.Barrier(6)  # opens only when all six samples are in their tool at once
    group, server = generated(
        model_dir,
        lambda body, n: reply_of("4", tokenizer),
        group_of(6, metadata={"barrier": barrier}),
        custom_generate_function_path=f"{HERE}.slow_tool",
        vllm_server_concurrency=1,
    )
    assert server.most_in_flight == 1
    assert [sample.reward for sample in group] == [1.0] * 6


def test_a_member_whose_engine_fails_is_marked_and_the_others_are_kept(model_dir: Path, tokenizer: Any) -> None:
    def answer(body: dict[str, Any], n: int) -> Any:
        failing = tokenizer.decode(body["token_ids"]).startswith("bad")
        return web.Response(status=400, text="no such token") if failing else reply_of("4", tokenizer)

    group = group_of(3)
    group[1].prompt = "bad"
    done, _ = generated(model_dir, answer, group)
    assert [sample.status for sample in done] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert done[1].reward is None
    assert "no such token" in done[1].metadata["failure"]


def test_a_judge_that_is_down_is_a_failure_and_not_reward_zero(model_dir: Path, tokenizer: Any) -> None:
    done, _ = generated(model_dir, lambda body, n: reply_of("4", tokenizer), custom_rm_path=f"{HERE}.judge_down_for_odd")
    assert [sample.reward for sample in done] == [1.0, None]
    assert done[1].status is Status.FAILED


def test_a_group_of_which_nothing_could_be_had_is_a_generation_error_with_the_cause(model_dir: Path) -> None:
    with pytest.raises(GenerationError, match=r"none of the 2 samples of group 0 could be had.*no worker"):
        generated(model_dir, lambda body, n: web.Response(status=503, text="no worker"), rollout_request_retries=0)


def test_siblings_of_a_fan_out_are_scored_each_and_keep_their_rollout_id(model_dir: Path, tokenizer: Any) -> None:
    done, _ = generated(model_dir, lambda body, n: reply_of("4", tokenizer), custom_generate_function_path=f"{HERE}.fan_out")
    assert [[part.rollout_id for part in member] for member in done] == [[0, 0], [1, 1]]
    assert [[part.reward for part in member] for member in done] == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("fan_out_without_ids", "must all carry the same rollout_id"),
        ("returns_text", "returned a str"),
        ("raises", r"raised KeyError: 'nothing here' at .*plugins.py:\d+"),
    ],
)
def test_a_generate_function_at_fault_ends_the_run(model_dir: Path, tokenizer: Any, function: str, said: str) -> None:
    with pytest.raises(HookError, match=said):
        generated(model_dir, lambda body, n: reply_of("4", tokenizer), custom_generate_function_path=f"{HERE}.{function}")


def test_a_group_reward_is_called_once_with_the_members_that_were_had(model_dir: Path, tokenizer: Any) -> None:
    flags = {"custom_rm_path": f"{HERE}.group_reward", "group_rm": True, "custom_generate_function_path": f"{HERE}.raises_for_odd"}
    done, _ = generated(model_dir, lambda body, n: reply_of("4", tokenizer), group_of(4), **flags)
    assert [sample.reward for sample in done] == [0.0, None, 1.0, None]


@pytest.mark.parametrize(("function", "said"), [("nan_reward", "nan, which is not a finite number"), ("none_reward", "gave None")])
def test_a_reward_that_is_no_number_ends_the_run_naming_sample_and_function(
    model_dir: Path, tokenizer: Any, function: str, said: str
) -> None:
    with pytest.raises(RewardError, match=f"sample 0 .*{function}.*{said}"):
        generated(model_dir, lambda body, n: reply_of("4", tokenizer), custom_rm_path=f"{HERE}.{function}")


def test_an_empty_prompt_is_a_data_error(model_dir: Path) -> None:
    with pytest.raises(DataError, match="empty prompt"):
        generated(model_dir, lambda body, n: {}, group_of(1, ""))


def test_seeds_in_deterministic_mode_differ_by_sample_and_turn_and_repeat_in_the_next_run(model_dir: Path, tokenizer: Any) -> None:
    def seeds(**flags: Any) -> list[int]:
        _, server = generated(
            model_dir, lambda body, n: reply_of("4", tokenizer), custom_generate_function_path=f"{HERE}.two_turns", **flags
        )
        return sorted(request["sampling_params"].get("seed") for request in server.requests)

    first = seeds(vllm_enable_deterministic_inference=True)
    assert len(set(first)) == 4
    assert first == seeds(vllm_enable_deterministic_inference=True)
    assert first != seeds(vllm_enable_deterministic_inference=True, rollout_seed=7)


def test_generate_works_outside_a_rollout_and_leaves_no_connection(model_dir: Path, tokenizer: Any) -> None:
    async def work() -> Sample:
        async with serving(lambda body, n: reply_of("4", tokenizer)) as server:
            args = make_args(server.runtime, hf_checkpoint=str(model_dir))
            return await generate(args, Sample(index=0, prompt="2+2="), {"max_new_tokens": 4, "temperature": 1.0})

    assert run(work()).response == "4<|im_end|>"
