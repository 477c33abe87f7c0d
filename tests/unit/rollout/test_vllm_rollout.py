"""A whole rollout step: filling the batch, filters, surplus, failures, deadlines, order, evaluation."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.unit.rollout.plugins import HERE
from tests.unit.rollout.support import WireServer, make_args, reply_of, run, serving
from vime.errors import ConfigError, DeadlineError, GenerationError, HookError
from vime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from vime.rollout.collect import MAX_FAILED_IN_A_ROW
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.vllm_rollout import generate_rollout, generate_rollout_async
from vime.utils.types import Sample

Status = Sample.Status


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Eight sums."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"input": f"{n}+0=", "label": str(n)}) + "\n" for n in range(8)))
    return file


class Rollout:
    """One rollout step against a server in this process."""

    def __init__(self, model_dir: Path, prompts: Path, answer: Any, evaluation: bool = False, **flags: Any) -> None:
        self.output: Any = None
        self.error: Exception | None = None
        self.source: RolloutDataSourceWithBuffer
        self.server: WireServer
        base = {"rm_type": "exact", "rollout_batch_size": 4, "n_samples_per_prompt": 2, "rollout_max_response_len": 8}
        self.flags = base | {"hf_checkpoint": str(model_dir), "prompt_data": str(prompts), "label_key": "label"} | flags
        run(self._run(answer, evaluation))

    async def _run(self, answer: Any, evaluation: bool) -> None:
        async with serving(answer) as self.server:
            args = make_args(self.server.runtime, **self.flags)
            self.source = RolloutDataSourceWithBuffer(args)
            self.output = await generate_rollout_async(args, 3, self.source, evaluation)

    @property
    def order(self) -> list[Any]:
        """group_index of the returned groups."""
        return [group[0].group_index for group in self.output.samples]


def echo(tokenizer: Any) -> Any:
    """Answers "n+0=" with "n"."""
    return lambda body, n: reply_of(tokenizer.decode(body["token_ids"]).partition("+")[0], tokenizer)


def test_a_step_returns_the_asked_groups_in_order_with_metrics(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    rollout = Rollout(model_dir, prompts, echo(tokenizer))
    assert isinstance(rollout.output, RolloutFnTrainOutput)
    assert rollout.order == [0, 1, 2, 3]
    assert [sample.index for group in rollout.output.samples for sample in group] == list(range(8))
    metrics = rollout.output.metrics
    assert metrics["rollout/raw_reward"] == 1.0
    assert metrics["rollout/response_len/mean"] == 2.0
    assert metrics["rollout/total_tokens"] == 16.0
    assert metrics["rollout/truncated_ratio"] == 0.0
    assert metrics["rollout/zero_std/count_1"] == 4.0
    assert metrics["rollout/failed_groups"] == 0.0
    assert metrics["rollout/staleness/max"] == 0.0
    assert metrics["perf/tokens_per_gpu_per_sec"] > 0
    assert all(isinstance(value, float) for value in metrics.values())


def test_the_order_is_that_of_the_prompts_however_fast_the_answers_come(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    later: list[asyncio.Event] = []

    async def reversed_answers(body: dict[str, Any]) -> Any:
        mine = asyncio.Event()
        later.append(mine)
        if len(later) == 8:
            for event in reversed(later):
                event.set()
                await asyncio.sleep(0)
        await mine.wait()
        return echo(tokenizer)(body, 0)

    assert Rollout(model_dir, prompts, lambda body, n: reversed_answers(body)).order == [0, 1, 2, 3]


def test_dropped_groups_are_replaced_and_counted(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    rollout = Rollout(model_dir, prompts, echo(tokenizer), dynamic_sampling_filter_path=f"{HERE}.drop_odd_groups")
    assert rollout.order == [0, 2, 4, 6]
    assert rollout.output.metrics["rollout/dynamic_filter/drop_odd"] in (3.0, 4.0)
    assert rollout.output.metrics["rollout/dynamic_filter/dropped_groups"] in (3.0, 4.0)
    assert rollout.source.buffer == []


def test_zero_std_groups_are_dropped_by_the_ready_made_filter(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    def answer(body: dict[str, Any], n: int) -> Any:
        number = tokenizer.decode(body["token_ids"]).partition("+")[0]
        return reply_of(number if number in "0123" or n % 2 else "wrong", tokenizer)

    path = "vime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    rollout = Rollout(model_dir, prompts, answer, dynamic_sampling_filter_path=path, rollout_batch_size=2, vllm_server_concurrency=1)
    assert rollout.order == [4, 5]
    assert rollout.output.metrics["rollout/dynamic_filter/drop_zero_std_1.0"] == 4.0


@pytest.mark.parametrize("deterministic", [False, True])
def test_surplus_groups_of_over_sampling_go_back_to_the_buffer(model_dir: Path, tokenizer: Any, prompts: Path, deterministic: bool) -> None:
    flags = {"over_sampling_batch_size": 7, "vllm_enable_deterministic_inference": deterministic}
    rollout = Rollout(model_dir, prompts, echo(tokenizer), **flags)
    assert len(rollout.order) == 4
    kept = {group[0].group_index for group in rollout.source.buffer}
    assert kept | set(rollout.order) == set(range(7))
    assert not kept & set(rollout.order)
    if deterministic:
        assert rollout.order == [0, 1, 2, 3]
        assert all(sample.status is Status.COMPLETED for group in rollout.source.buffer for sample in group)


def test_an_unfinished_surplus_group_goes_back_as_it_was(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    flags = {"custom_generate_function_path": f"{HERE}.never_returns", "over_sampling_batch_size": 5}
    rollout = Rollout(model_dir, prompts, echo(tokenizer), **flags)
    assert rollout.order == [0, 2, 3, 4]
    (waiting,) = rollout.source.buffer
    assert [(sample.group_index, sample.status, sample.tokens) for sample in waiting] == [(1, Status.PENDING, [])] * 2


def test_finished_groups_of_the_buffer_are_not_generated_again(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    async def twice() -> tuple[int, list[Any]]:
        async with serving(echo(tokenizer)) as server:
            flags = {"rollout_batch_size": 4, "n_samples_per_prompt": 1, "over_sampling_batch_size": 8, "rm_type": "exact"}
            deterministic = {"vllm_enable_deterministic_inference": True}
            paths = {"hf_checkpoint": str(model_dir), "prompt_data": str(prompts), "label_key": "label"}
            args = make_args(server.runtime, **flags, **paths, **deterministic)
            source = RolloutDataSourceWithBuffer(args)
            await generate_rollout_async(args, 0, source)
            before = len(server.requests)
            second = await generate_rollout_async(args, 1, source)
            assert before == 8
            return len(server.requests) - before, [group[0].group_index for group in second.samples]

    new_requests, order = run(twice())
    assert order == [4, 5, 6, 7]
    assert new_requests == 4  # of the four fresh groups that filled the second fetch up


def test_a_group_that_cannot_be_had_is_counted_and_replaced(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    def answer(body: dict[str, Any], n: int) -> Any:
        return web.Response(status=422, text="odd") if tokenizer.decode(body["token_ids"])[0] in "13" else echo(tokenizer)(body, n)

    rollout = Rollout(model_dir, prompts, answer)
    assert rollout.order == [0, 2, 4, 5]
    assert rollout.output.metrics["rollout/failed_groups"] == 2.0


@pytest.mark.parametrize(
    "flags",
    [
        {"custom_generate_function_path": f"{HERE}.cancelled_for_group_1"},
        {"custom_rm_path": f"{HERE}.cancelled_group_reward_for_1", "group_rm": True},
    ],
)
def test_a_cancellation_in_a_users_function_is_a_group_that_cannot_be_had(
    model_dir: Path, tokenizer: Any, prompts: Path, flags: dict[str, Any]
) -> None:
    rollout = Rollout(model_dir, prompts, echo(tokenizer), **flags)
    assert rollout.order == [0, 2, 3, 4]
    assert rollout.output.metrics["rollout/failed_groups"] == 1.0


def test_an_evaluation_counts_a_group_whose_function_was_cancelled_as_not_had(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    flags = {"eval_prompt_data": ["sums", str(prompts)], "custom_generate_function_path": f"{HERE}.cancelled_for_group_1"}
    output = Rollout(model_dir, prompts, echo(tokenizer), evaluation=True, **flags).output
    assert len(output.data["sums"]["samples"]) == 7


def test_failed_members_do_not_enter_the_statistics(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    rollout = Rollout(model_dir, prompts, echo(tokenizer), custom_rm_path=f"{HERE}.judge_down_for_odd")
    assert rollout.output.metrics["rollout/failed_samples"] == 4.0
    assert rollout.output.metrics["rollout/raw_reward"] == 1.0


def test_too_many_failures_in_a_row_end_the_run_with_the_last_cause(model_dir: Path, prompts: Path) -> None:
    with pytest.raises(GenerationError, match=f"{MAX_FAILED_IN_A_ROW} groups in a row could not be had.*engine core is dead"):
        Rollout(model_dir, prompts, lambda body, n: web.Response(status=500, text="engine core is dead"), rollout_request_retries=0)


def test_a_deadline_names_the_step_and_how_far_it_came(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    flags = {"custom_generate_function_path": f"{HERE}.never_returns", "rollout_deadline": 4.0}
    with pytest.raises(DeadlineError, match=r"rollout step 3 did not finish 'generate' within 4 s .*3 of 4 groups"):
        Rollout(model_dir, prompts, echo(tokenizer), **flags)


def test_the_sample_filter_marks_samples(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    rollout = Rollout(model_dir, prompts, echo(tokenizer), rollout_sample_filter_path=f"{HERE}.remove_first")
    assert [[sample.remove_sample for sample in group] for group in rollout.output.samples] == [[True, False]] * 4


def test_a_dict_reward_is_read_by_its_key(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    rollout = Rollout(model_dir, prompts, echo(tokenizer), custom_rm_path=f"{HERE}.dict_reward", reward_key="score")
    assert rollout.output.metrics["rollout/raw_reward"] == 0.25
    assert rollout.output.samples[0][0].reward == {"score": 0.25, "format": 1.0}


def test_a_reward_that_raises_ends_the_run_pointing_into_the_users_code(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    with pytest.raises(HookError, match=r"raising_reward raised ZeroDivisionError.*plugins\.py:\d+ \(return 1\.0"):
        Rollout(model_dir, prompts, echo(tokenizer), custom_rm_path=f"{HERE}.raising_reward")


def test_evaluation_scores_each_file_with_its_own_sampling(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    rollout = Rollout(
        model_dir,
        prompts,
        echo(tokenizer),
        evaluation=True,
        eval_prompt_data=["sums", f"{prompts}@[0:3]", "more", str(prompts)],
        eval_temperature=0.0,
        eval_max_response_len=5,
        n_samples_per_eval_prompt=2,
    )
    assert isinstance(rollout.output, RolloutFnEvalOutput)
    assert rollout.output.metrics["eval/sums"] == 1.0
    assert rollout.output.metrics["eval/sums-truncated_ratio"] == 0.0
    assert len(rollout.output.data["sums"]["rewards"]) == 6
    assert len(rollout.output.data["more"]["samples"]) == 16
    assert {(r["sampling_params"]["temperature"], r["sampling_params"]["max_tokens"]) for r in rollout.server.requests} == {(0.0, 5)}
    assert rollout.source.sample_offset == 0  # the training prompts are not touched


def test_evaluation_leaves_out_and_counts_what_could_not_be_had(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    def answer(body: dict[str, Any], n: int) -> Any:
        return web.Response(status=422) if tokenizer.decode(body["token_ids"])[0] == "7" else echo(tokenizer)(body, n)

    rollout = Rollout(model_dir, prompts, answer, evaluation=True, eval_prompt_data=["sums", str(prompts)])
    assert rollout.output.metrics["eval/sums"] == 1.0
    assert rollout.output.metrics["eval/sums-failed"] == 1.0
    assert len(rollout.output.data["sums"]["rewards"]) == 7


def test_an_evaluation_that_takes_too_long_says_how_far_it_came(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    flags = {"custom_generate_function_path": f"{HERE}.never_returns", "rollout_deadline": 4.0}
    with pytest.raises(DeadlineError, match=r"evaluation 'sums' .*7 of 8 prompts"):
        Rollout(model_dir, prompts, echo(tokenizer), evaluation=True, eval_prompt_data=["sums", str(prompts)], **flags)


@pytest.mark.parametrize("words", [[], ["sums"], ["sums", "a.jsonl", "sums", "b.jsonl"]])
def test_evaluation_files_must_be_pairs(model_dir: Path, prompts: Path, words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--eval-prompt-data"):
        Rollout(model_dir, prompts, lambda body, n: {}, evaluation=True, eval_prompt_data=words)


def test_a_rollout_without_engines_says_so(model_dir: Path, prompts: Path) -> None:
    args = make_args(hf_checkpoint=str(model_dir), prompt_data=str(prompts), rollout_batch_size=1)
    with pytest.raises(ConfigError, match="no router is running"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_the_synchronous_entry_refuses_to_block_an_event_loop(model_dir: Path) -> None:
    async def inside() -> None:
        generate_rollout(make_args(hf_checkpoint=str(model_dir)), 0, None)

    with pytest.raises(HookError, match="await generate_rollout_async"):
        run(inside())


def test_sample_hooks_run_in_order_before_the_reward(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    hooks = {"rollout_sample_hook_path": [f"{HERE}.shout", f"{HERE}.replaced"]}
    rollout = Rollout(model_dir, prompts, echo(tokenizer), **hooks)
    assert all(sample.metadata["hooked"] == [3, False, "replaced", None] for group in rollout.output.samples for sample in group)
    assert rollout.output.metrics["rollout/raw_reward"] == 1.0
    rollout = Rollout(model_dir, prompts, echo(tokenizer), evaluation=True, eval_prompt_data=["sums", str(prompts)], **hooks)
    assert all(sample.metadata["hooked"][1] is True for sample in rollout.output.data["sums"]["samples"])


def test_a_sample_hook_that_returns_no_sample_is_named(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    with pytest.raises(HookError, match=r"--rollout-sample-hook-path .*returns_a_word, sample \d+: it returned a str"):
        Rollout(model_dir, prompts, echo(tokenizer), rollout_sample_hook_path=[f"{HERE}.returns_a_word"])


def test_all_groups_of_a_step_are_shown_those_that_were_dropped_too(model_dir: Path, tokenizer: Any, prompts: Path) -> None:
    flags = {"dynamic_sampling_filter_path": f"{HERE}.drop_odd_groups", "rollout_all_samples_process_path": f"{HERE}.all_seen"}
    rollout = Rollout(model_dir, prompts, echo(tokenizer), **flags)
    seen = rollout.source.metadata["seen"]
    assert set(rollout.order) < set(seen)
    assert seen == sorted(seen)
    assert any(index % 2 for index in seen)
