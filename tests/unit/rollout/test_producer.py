"""Rollouts in a thread: a user's rollout function is called ahead, held, and its failure is everybody's."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rollout.pool_plugin import generate_rollout_fully_async, stop_worker
from tests.unit.rollout.support import make_args, reply_of, run, serving
from vime.errors import ConfigError, DeadlineError, HookError
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.engine_access import EngineAccess
from vime.rollout.producer import GroupProducer, StepProducer


class Calls:
    """A rollout function that returns when it is told to."""

    def __init__(self) -> None:
        self.begun: dict[int, threading.Event] = defaultdict(threading.Event)
        self.may_end: dict[int, threading.Event] = defaultdict(threading.Event)
        self.order: list[int] = []

    def __call__(self, step: int) -> str:
        self.order.append(step)
        self.begun[step].set()
        assert self.may_end[step].wait(30.0)
        return f"batch {step}"


def producer(calls: Any, *, bound: int = 1, num_steps: int = 9, deadline: float = 30.0) -> StepProducer:
    return StepProducer(calls, first_step=0, num_steps=num_steps, bound=bound, version=0, deadline=deadline)


def test_steps_are_called_in_order_and_no_further_ahead_than_the_bound() -> None:
    calls = Calls()
    made = producer(calls)
    for step in range(3):
        calls.may_end[step].set()
    made.resume(0)
    assert made.take(0) == "batch 0"
    assert made.take(1) == "batch 1"  # version 0 and one step ahead
    made.drain()
    assert calls.order == [0, 1]
    made.resume(1)
    assert made.take(2) == "batch 2"
    assert calls.order == [0, 1, 2]
    made.close()


def test_a_drain_waits_for_the_call_that_runs() -> None:
    calls = Calls()
    made = producer(calls)
    made.resume(0)
    assert calls.begun[0].wait(30.0)
    drained = threading.Thread(target=made.drain)
    drained.start()
    assert drained.is_alive()
    calls.may_end[0].set()
    drained.join(30.0)
    assert not drained.is_alive()
    assert calls.order == [0]
    made.close()


def test_no_call_is_made_beyond_the_last_step() -> None:
    calls = Calls()
    for step in range(9):
        calls.may_end[step].set()
    made = producer(calls, bound=5, num_steps=2)
    made.resume(0)
    assert [made.take(0), made.take(1)] == ["batch 0", "batch 1"]
    made.drain()
    assert calls.order == [0, 1]
    made.close()


def test_what_a_call_raises_is_raised_where_its_batch_is_wanted() -> None:
    def fails(step: int) -> Any:
        raise HookError(f"broken at {step}")

    made = producer(fails)
    made.resume(0)
    with pytest.raises(HookError, match="broken at 0"):
        made.take(0)
    assert isinstance(made.failure, HookError)
    with pytest.raises(HookError, match="broken at 0"):
        made.drain()


def test_a_call_that_takes_too_long_is_named() -> None:
    calls = Calls()
    made = producer(calls, deadline=0.05)
    made.resume(0)
    with pytest.raises(DeadlineError, match=r"the batch of step 0 did not finish 'generate' within 0.05 s"):
        made.take(0)
    calls.may_end[0].set()
    made.close()


def test_groups_that_cannot_be_begun_say_why(model_dir: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input": "1"}\n')
    args = make_args(hf_checkpoint=str(model_dir), prompt_data=str(prompts), rollout_batch_size=1)
    with pytest.raises(ConfigError, match="no router is running"):
        GroupProducer(args, RolloutDataSourceWithBuffer(args), first_step=0, num_steps=1, bound=1, version=0)


def test_a_rollout_function_with_a_pool_of_its_own_works_as_in_slime(model_dir: Path, tokenizer: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"{n}+0=", "label": str(n)}) + "\n" for n in range(9)))

    def answer(body: dict[str, Any], _: int) -> Any:
        return reply_of(tokenizer.decode(body["token_ids"]).partition("+")[0], tokenizer)

    async def work() -> list[Any]:
        async with serving(answer) as server:
            flags = {"hf_checkpoint": str(model_dir), "prompt_data": str(prompts), "label_key": "label", "rm_type": "exact"}
            args = make_args(server.runtime, rollout_batch_size=2, n_samples_per_prompt=2, **flags)
            source = RolloutDataSourceWithBuffer(args)
            made = producer(lambda step: generate_rollout_fully_async(args, step, source), num_steps=3)
            made.resume(0)
            batches = [await asyncio.to_thread(made.take, 0), await asyncio.to_thread(made.take, 1)]
            await asyncio.to_thread(made.drain)
            made.resume(1)
            batches.append(await asyncio.to_thread(made.take, 2))
            await asyncio.to_thread(stop_worker)
            made.close()
            return batches

    batches = run(work())
    indices = [sample.index for batch in batches for group in batch.samples for sample in group]
    assert len(indices) == len(set(indices)) == 12
    assert all(sample.reward == 1.0 for batch in batches for group in batch.samples for sample in group)


def test_a_group_producer_makes_batches_in_a_thread_of_its_own(model_dir: Path, tokenizer: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"{n}+0=", "label": str(n)}) + "\n" for n in range(9)))

    async def work() -> tuple[list[int], dict[str, float]]:
        async with serving(lambda body, _: reply_of("1", tokenizer, version="0")) as server:
            access = EngineAccess()
            access.version = 0
            flags = {"hf_checkpoint": str(model_dir), "prompt_data": str(prompts), "label_key": "label", "rm_type": "exact"}
            args = make_args(server.runtime | {"engine_access": access}, rollout_batch_size=2, max_weight_staleness=1, **flags)
            source = RolloutDataSourceWithBuffer(args)
            numbers = {"first_step": 0, "num_steps": 3, "bound": 1, "version": 0}
            made = await asyncio.to_thread(lambda: GroupProducer(args, source, **numbers))
            await asyncio.to_thread(made.resume, 0)
            order, metrics = [], {}
            for step in range(3):
                output = await asyncio.to_thread(made.take, step)
                order += [group[0].group_index for group in output.samples]
                metrics = output.metrics
                await asyncio.to_thread(made.drain)
                await asyncio.to_thread(made.resume, step + 1)
            await asyncio.to_thread(made.close)
            assert not made._thread.is_alive()
            return order, metrics

    order, metrics = run(work())
    assert sorted(order) == list(range(6))
    assert metrics["rollout/queue_depth"] == 0.0
    assert metrics["rollout/staleness/max"] == 2.0  # this engine keeps its weights
    assert metrics["perf/engine_idle_time"] >= 0.0
