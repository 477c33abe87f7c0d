"""The default rollout: prompts to the vLLM engines behind the router, answers to the rewards.

    generate_rollout ─▶ BatchCollector (collect.py) or evaluate (evaluation.py)
                          └▶ generate_and_rm_group ─▶ generate_and_rm ─▶ generate (generation.py) ─▶ EngineClient ─▶ router
                                                                      └▶ async_rm (rm_hub)

Plain async Python over `Sample`: nothing here knows of Ray or Megatron. The names below are the ones that plug-ins import.
"""

from __future__ import annotations

import asyncio
from typing import Any

from vime.errors import HookError
from vime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from vime.rollout.collect import BatchCollector
from vime.rollout.evaluation import evaluate
from vime.rollout.generate_state import GenerateState
from vime.rollout.generation import generate, generate_and_rm, generate_and_rm_group
from vime.rollout.resources import RolloutResources
from vime.utils.http_utils import get_model_url

__all__ = [
    "GenerateState",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_model_url",
]


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """One rollout step, or an evaluation, from a thread that runs no event loop.

    Args:
        args: the flat view of the configuration, with `vllm_router_ip`, `vllm_router_port` and `num_engines`.
        rollout_id: the step; named in errors.
        data_source: where groups come from and surplus goes to (see `vime.rollout.data_source.DataSource`).
        evaluation: score --eval-prompt-data instead.

    Raises:
        See `BatchCollector.collect` and `evaluate`.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        shared = getattr(data_source, "resources", None)
        run = shared.loop.run if isinstance(shared, RolloutResources) else asyncio.run
        return run(generate_rollout_async(args, rollout_id, data_source, evaluation))
    raise HookError("generate_rollout was called inside an event loop, which it would block. There, await generate_rollout_async(...).")


async def generate_rollout_async(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """`generate_rollout` as a coroutine."""
    shared = getattr(data_source, "resources", None)
    resources = shared if isinstance(shared, RolloutResources) else RolloutResources(args.hf_checkpoint)
    try:
        async with GenerateState(args, resources).running() as state:
            if evaluation:
                return await evaluate(state)
            return await BatchCollector(state, rollout_id, data_source).collect()
    finally:
        if resources is not shared:
            await asyncio.to_thread(resources.close)
