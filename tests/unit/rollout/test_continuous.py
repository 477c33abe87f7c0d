"""Groups generated ahead of the trainer: how many, which are trained first, and what becomes of those that are too old."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.unit.rollout.plugins import HERE
from tests.unit.rollout.support import make_args, reply_of, run, serving
from vime.errors import DeadlineError, GenerationError, HookError
from vime.rollout.continuous import ContinuousCollector, renewed
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.engine_access import EngineAccess
from vime.rollout.generate_state import GenerateState
from vime.utils.types import Sample

Status = Sample.Status


class Engine:
    """Answers the prompt "n+0=" with "n", once `release(n)` was said; under the weight version that it holds then."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.version = tokenizer, 0
        self.may_answer: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.begun: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.asked: list[int] = []

    def release(self, *numbers: int) -> None:
        """Let these prompts be answered."""
        for number in numbers:
            self.may_answer[number].set()

    async def answer(self, body: dict[str, Any]) -> Any:
        """One reply."""
        number = int(self.tokenizer.decode(body["token_ids"]).partition("+")[0])
        self.asked.append(number)
        self.begun[number].set()
        await self.may_answer[number].wait()
        return reply_of(str(number), self.tokenizer, version=str(self.version))


@pytest.fixture
def flags(model_dir: Path, tmp_path: Path) -> dict[str, Any]:
    """Batches of two groups of one sample."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"input": f"{n}+0=", "label": str(n)}) + "\n" for n in range(30)))
    return {
        "hf_checkpoint": str(model_dir), "prompt_data": str(file), "label_key": "label", "custom_rm_path": f"{HERE}.length_reward",
        "rollout_batch_size": 2, "rollout_max_response_len": 8, "max_weight_staleness": 1,
    }  # fmt: skip


@contextlib.asynccontextmanager
async def collecting(
    tokenizer: Any, flags: dict[str, Any], *, bound: int = 1, num_steps: int = 9
) -> AsyncIterator[tuple[Engine, ContinuousCollector]]:
    """An engine and a collector that has begun at step 0."""
    engine = Engine(tokenizer)
    async with serving(lambda body, _: engine.answer(body)) as server:
        access = EngineAccess()
        access.version = 0
        args = make_args(server.runtime | {"engine_access": access}, **flags)
        async with GenerateState(args).running() as state:
            source = RolloutDataSourceWithBuffer(args)
            collector = ContinuousCollector(state, source, first_step=0, num_steps=num_steps, bound=bound, version=0)
            collector.resume(0)
            try:
                yield engine, collector
            finally:
                await collector.close()


def numbers(output: Any) -> list[int]:
    """Prompts of a batch."""
    return [group[0].group_index for group in output.samples]


def outstanding(collector: ContinuousCollector) -> int:
    """Groups that are begun or wait."""
    return len(collector.pending) + len(collector.ready)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_never_more_groups_are_ahead_than_can_be_trained_within_the_bound(tokenizer: Any, flags: dict[str, Any], bound: int) -> None:
    async def work() -> None:
        async with collecting(tokenizer, flags, bound=bound) as (engine, collector):
            engine.release(*range(30))
            assert outstanding(collector) == 2 * (bound + 1)
            for step in range(4):
                output = await collector.take_batch(step)
                assert outstanding(collector) == 2 * bound  # while the trainer trains `step`
                assert output.metrics["rollout/staleness/max"] <= bound
                engine.version = step + 1
                collector.resume(step + 1)
                assert outstanding(collector) == 2 * (bound + 1)

    run(work())


def test_nothing_is_begun_beyond_the_last_step(tokenizer: Any, flags: dict[str, Any]) -> None:
    async def work() -> list[list[int]]:
        async with collecting(tokenizer, flags, bound=3, num_steps=2) as (engine, collector):
            engine.release(*range(30))
            batches = [numbers(await collector.take_batch(step)) for step in range(2)]
            assert sorted(engine.asked) == [0, 1, 2, 3]
            return batches

    batches = run(work())
    assert sorted(batches[0] + batches[1]) == [0, 1, 2, 3]


def test_finished_groups_go_first_and_a_slow_one_is_waited_for_before_it_is_too_old(tokenizer: Any, flags: dict[str, Any]) -> None:
    async def work() -> None:
        async with collecting(tokenizer, flags) as (engine, collector):
            engine.release(1, 2, 3, 4, 5)
            assert numbers(await collector.take_batch(0)) == [1, 2]  # 0 is slow
            engine.version = 1
            collector.resume(1)
            second = asyncio.ensure_future(collector.take_batch(1))
            for number in (4, 5):
                await engine.begun[number].wait()
            while len(collector.ready) < 3:
                await asyncio.wait(list(collector.pending), return_when=asyncio.FIRST_COMPLETED)
            assert not second.done()  # 3, 4 and 5 are there, but 0 would be two versions old in the next step
            engine.release(0)
            output = await second
            assert numbers(output) == [0, 3]
            assert output.samples[0][0].weight_versions == ["1", "1"]  # the engine answered after its update
            assert output.metrics["rollout/queue_depth"] == 2.0

    run(work())


@pytest.mark.parametrize("policy", ["reissue", "drop"])
def test_a_group_over_the_bound_is_generated_anew_or_dropped(tokenizer: Any, flags: dict[str, Any], policy: str) -> None:
    async def work() -> None:
        async with collecting(tokenizer, flags | {"stale_groups": policy}) as (engine, collector):
            engine.release(*range(1, 30))
            for step in range(2):
                assert 0 not in numbers(await collector.take_batch(step))
                engine.version = step + 1
                collector.resume(step + 1)
            output = await collector.take_batch(2)
            assert output.metrics[f"rollout/stale/{'dropped' if policy == 'drop' else 'reissued'}"] == 1.0
            assert engine.asked.count(0) == 1 or policy == "reissue"
            again = [w for w in collector.pending.values() if w.group[0].group_index == 0]  # type: ignore[union-attr]
            assert [w.version for w in again] == ([] if policy == "drop" else [2])

    run(work())


def test_a_drain_waits_for_what_runs_and_begins_nothing(tokenizer: Any, flags: dict[str, Any]) -> None:
    async def work() -> None:
        async with collecting(tokenizer, flags) as (engine, collector):
            drained = asyncio.ensure_future(collector.drain())
            engine.release(0, 1, 2)
            while len(collector.ready) < 3:
                await asyncio.wait(list(collector.pending), return_when=asyncio.FIRST_COMPLETED)
            assert not drained.done()
            engine.release(3)
            await drained
            assert engine.asked == [0, 1, 2, 3]
            batch = await collector.take_batch(0)
            assert numbers(batch) == [0, 1]
            assert not collector.pending  # held until it is resumed
            collector.resume(1)
            assert len(collector.pending) == 2

    run(work())


def test_deterministic_batches_are_in_the_order_of_the_prompts(tokenizer: Any, flags: dict[str, Any]) -> None:
    async def work() -> None:
        async with collecting(tokenizer, flags | {"vllm_enable_deterministic_inference": True}) as (engine, collector):
            engine.release(1, 2, 3)
            first = asyncio.ensure_future(collector.take_batch(0))
            while len(collector.ready) < 3:
                await asyncio.wait(list(collector.pending), return_when=asyncio.FIRST_COMPLETED)
            assert not first.done()
            engine.release(0)
            assert numbers(await first) == [0, 1]

    run(work())


def test_what_a_group_raises_ends_the_wait_with_its_own_error(tokenizer: Any, flags: dict[str, Any]) -> None:
    async def work() -> None:
        async with collecting(tokenizer, flags | {"custom_rm_path": f"{HERE}.raising_reward"}) as (engine, collector):
            engine.release(*range(30))
            with pytest.raises(HookError, match="raising_reward raised ZeroDivisionError"):
                await collector.take_batch(0)
            assert isinstance(collector.failure, HookError)

    run(work())


@pytest.mark.parametrize(
    "chosen",
    [
        {"custom_generate_function_path": f"{HERE}.cancelled_for_group_1"},
        {"custom_rm_path": f"{HERE}.cancelled_group_reward_for_1", "group_rm": True},
    ],
)
def test_a_cancellation_in_a_users_function_is_a_failed_group_and_another_is_begun(
    tokenizer: Any, flags: dict[str, Any], chosen: dict[str, Any]
) -> None:
    async def work() -> Any:
        async with collecting(tokenizer, flags | chosen | {"vllm_enable_deterministic_inference": True}, num_steps=2) as (
            engine,
            collector,
        ):
            engine.release(*range(30))
            return [await collector.take_batch(step) for step in range(2)]

    outputs = run(work())
    assert [numbers(output) for output in outputs] == [[0, 2], [3, 4]]
    assert sum(output.metrics["rollout/failed_groups"] for output in outputs) == 1.0


def test_failing_engines_end_it_and_a_silent_one_runs_into_the_deadline(tokenizer: Any, flags: dict[str, Any]) -> None:
    async def broken() -> None:
        async with serving(lambda body, n: web.Response(status=500, text="engine core is dead")) as server:
            args = make_args(server.runtime, **flags, rollout_request_retries=0)
            async with GenerateState(args).running() as state:
                source = RolloutDataSourceWithBuffer(args)
                collector = ContinuousCollector(state, source, first_step=0, num_steps=9, bound=1, version=0)
                collector.resume(0)
                await collector.take_batch(0)

    async def silent() -> None:
        async with collecting(tokenizer, flags | {"rollout_deadline": 0.2}) as (_, collector):
            await collector.take_batch(0)

    with pytest.raises(GenerationError, match=r"groups in a row could not be had.*engine core is dead"):
        run(broken())
    with pytest.raises(DeadlineError, match=r"the batch of step 0 did not finish 'generate' within 0.2 s .*0 of 2 groups"):
        run(silent())


def test_a_renewed_group_is_as_the_data_source_gave_it() -> None:
    fresh = Sample(group_index=3, index=7, prompt="1+1=", label="2", metadata={"row": 1})
    used = Sample.from_dict(fresh.to_dict())
    used.metadata = {"row": 1, "failure": "gone", "start_rollout_id": 2}
    used.tokens, used.session_id, used.reward = [5, 6], "s", 1.0
    used.append_response_tokens(
        tokens=[7], log_probs=[-0.1], weight_versions=["1"], kept=[[7]], routed_experts="x", text="2", status=Status.COMPLETED
    )
    (again,) = renewed([used])
    assert isinstance(again, Sample)
    assert again.tokens == [5, 6]
    again.tokens = []
    assert again == fresh


@pytest.mark.parametrize("policy", ["wait", "reissue", "drop"])
def test_groups_that_come_back_with_tokens_over_the_bound_are_generated_anew_or_dropped(
    tokenizer: Any, flags: dict[str, Any], policy: str
) -> None:
    def answer(body: dict[str, Any], n: int) -> Any:
        return reply_of("7", tokenizer, version="10")

    def held(number: int, version: str) -> list[Any]:
        """A group as a rollout that was cut off gave it back."""
        sample = Sample(group_index=number, index=number, prompt=f"{number}+0=", label="7", status=Status.ABORTED)
        sample.tokens = tokenizer.encode(sample.prompt, add_special_tokens=False)
        sample.append_response_tokens(
            tokens=tokenizer.encode("7", add_special_tokens=False), log_probs=[-0.1], weight_versions=[version], text="7"
        )
        sample.status = Status.ABORTED
        return [sample]

    async def work() -> Any:
        async with serving(answer) as server:
            access = EngineAccess()
            access.version = 10
            args = make_args(server.runtime | {"engine_access": access}, **flags, stale_groups=policy)
            async with GenerateState(args).running() as state:
                source = RolloutDataSourceWithBuffer(args)
                source.add_samples([held(100, "9"), *(held(number, "0") for number in range(101, 109))])  # more than one look finds
                collector = ContinuousCollector(state, source, first_step=10, num_steps=12, bound=1, version=10)
                collector.resume(10)
                try:
                    return [await collector.take_batch(step) for step in (10, 11)]
                finally:
                    await collector.close()

    outputs = run(work())
    versions = {group[0].group_index: group[0].weight_versions for output in outputs for group in output.samples}
    if policy == "drop":  # 100, at the bound, goes on from its token
        assert versions == {100: ["9", "10", "10"]} | {number: ["10", "10"] for number in range(3)}
    else:
        assert versions == {number: ["10", "10"] for number in range(101, 105)}
    kind, count = ("dropped", 8.0) if policy == "drop" else ("reissued", 4.0)
    assert sum(output.metrics[f"rollout/stale/{kind}"] for output in outputs) == count
    assert max(output.metrics["rollout/staleness/max"] for output in outputs) <= 1.0
