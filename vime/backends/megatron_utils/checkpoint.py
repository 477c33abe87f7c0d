"""Saving and resuming through Megatron's dist_checkpointing: a saved state loads at any tensor- and data-parallel size."""

from __future__ import annotations

import queue
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from vime.errors import CheckpointError, ConfigError

__all__ = ["load_state", "save_state"]

COMPLETE = "metadata.json"  # dist_checkpointing writes it last


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }


def _sharded(model: torch.nn.Module, optimizer: MegatronOptimizer, *, loading: bool) -> dict[str, Any]:
    model_state = model.module.sharded_state_dict(metadata=_metadata())
    model_state = {name: value for name, value in model_state.items() if "_extra_state" not in name}
    return {"model": model_state, "optimizer": optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=_metadata())}


def layout() -> dict[str, int]:
    """What the random states of a checkpoint are bound to."""
    return {"world": dist.get_world_size(), "tensor": parallel_state.get_tensor_model_parallel_world_size()}


def _generators() -> dict[str, Any]:
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": {name: state.cpu() for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()},
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_generators(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])


def save_state(path: str, model: torch.nn.Module, optimizer: MegatronOptimizer, schedule: OptimizerParamScheduler, *, step: int) -> None:
    """Write the whole training state into the folder `path`. Collective. The folder is complete once `metadata.json` is there."""
    if dist.get_rank() == 0:
        Path(path).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    generators: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(generators, _generators())
    state = _sharded(model, optimizer, loading=False)
    state |= {"step": step, "schedule": schedule.state_dict(), "generators": generators, "layout": layout()}
    # The results of a synchronous save stay in this process. Megatron would start a Manager process for them (5 s and 300 MB
    # at the first save, and left behind when a trainer is killed); a plain queue does.
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(state, path)
    dist.barrier()


def load_state(path: str, model: torch.nn.Module, optimizer: MegatronOptimizer, schedule: OptimizerParamScheduler) -> tuple[int, bool]:
    """Load what `save_state` wrote. Collective. Returns (step, whether the random states were restored too).

    Random states are bound to a layout: at another one they stay as the seed made them. Raises CheckpointError for a folder
    that is missing or torn, ConfigError when the schedule's flags differ from the saved ones and no flag says which to take.
    """
    if not (Path(path) / COMPLETE).is_file():
        raise CheckpointError(f"{path} is no complete trainer state: {COMPLETE}, which is written last, is missing.")
    try:
        state = dist_checkpointing.load(_sharded(model, optimizer, loading=True), path)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be loaded ({type(error).__name__}: {str(error)[:500]}). It is torn, or of a model of another shape."
        ) from error
    model.module.load_state_dict(state["model"], strict=False)
    with torch.no_grad():
        optimizer.load_state_dict(state["optimizer"])
    try:
        schedule.load_state_dict(state["schedule"])
    except AssertionError as error:
        raise ConfigError(
            f"the learning-rate schedule differs from the one saved in {path} ({error}). "
            "Say --override-opt-param-scheduler to take the flags', or --use-checkpoint-opt-param-scheduler to take the saved one."
        ) from error
    same = state["layout"] == layout()
    if same:
        _set_generators(state["generators"][dist.get_rank()])
    return int(state["step"]), same
