"""`GenerateState(args)` is the current rollout's, and only the current rollout's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.unit.rollout.support import make_args, run
from vime.rollout.vllm_rollout import GenerateState

ROUTER = {"vllm_router_ip": "127.0.0.1", "vllm_router_port": 1, "num_engines": 3}


def args_of(model_dir: Path, **flags: Any) -> Any:
    """Args with a router."""
    return make_args(ROUTER, hf_checkpoint=str(model_dir), **flags)


def test_tasks_of_a_rollout_find_its_state_and_two_rollouts_do_not_mix(model_dir: Path) -> None:
    async def rollout(args: Any, both_run: asyncio.Barrier) -> tuple[bool, float]:
        async with GenerateState(args).running() as state:
            await both_run.wait()
            found = await asyncio.create_task(find(args))
            return found is state, found.sampling_params["temperature"]

    async def find(args: Any) -> GenerateState:
        return GenerateState(args)

    async def work() -> list[tuple[bool, float]]:
        barrier = asyncio.Barrier(2)
        return await asyncio.gather(*(rollout(args_of(model_dir, rollout_temperature=t), barrier) for t in (0.5, 1.5)))

    assert run(work()) == [(True, 0.5), (True, 1.5)]


def test_outside_a_rollout_each_call_makes_its_own(model_dir: Path) -> None:
    args = args_of(model_dir)
    assert GenerateState(args) is not GenerateState(args)


def test_the_limit_is_concurrency_times_engines(model_dir: Path) -> None:
    assert GenerateState(args_of(model_dir, vllm_server_concurrency=4)).semaphore._value == 12


def test_the_tokenizer_is_loaded_once_for_all_rollouts_of_a_run(model_dir: Path) -> None:
    args = args_of(model_dir)
    first = GenerateState(args)
    assert GenerateState(args, first.resources).tokenizer is first.tokenizer
