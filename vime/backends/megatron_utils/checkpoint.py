"""Saving and resuming through Megatron's dist_checkpointing: a saved state loads at any tensor- and data-parallel size."""

from __future__ import annotations

import logging
import queue
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint import CheckpointException

from vime.backends.megatron_utils.convert.writer import written_by_first
from vime.backends.megatron_utils.lora_ops import is_adapter
from vime.backends.megatron_utils.state_writer import Planned, StateWriter
from vime.errors import CheckpointError, ConfigError

__all__ = ["load_state", "start_save"]

Chunks = Sequence[torch.nn.Module]  # this rank's share of the model, wrapped in DistributedDataParallel

log = logging.getLogger(__name__)
SCHEDULED = ("max_lr", "min_lr", "start_wd", "end_wd")  # what the schedule reads from a parameter group
COMPLETE = "metadata.json"  # dist_checkpointing writes it last


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }


def _sharded_weights(chunks: Chunks, *, adapters: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for number, chunk in enumerate(chunks):
        values = chunk.module.sharded_state_dict(metadata=_metadata())
        kept = {name: value for name, value in values.items() if "_extra_state" not in name and (is_adapter(name) or not adapters)}
        state[_name(chunks, number)] = kept
    return state


def _sharded(chunks: Chunks, optimizer: MegatronOptimizer, *, loading: bool, adapters: bool) -> dict[str, Any]:
    """Weights and optimizer. With `loading` the optimizer's moments are overwritten with what its memory held: all of it must be loaded."""
    state = _sharded_weights(chunks, adapters=adapters)
    of_model = state if len(chunks) > 1 else state["model"]
    return state | {"optimizer": optimizer.sharded_state_dict(of_model, is_loading=loading, metadata=_metadata())}


def _name(chunks: Chunks, number: int) -> str:
    """Under which a chunk's state stands; Megatron's optimizer looks for these. What is stored does not depend on it."""
    return "model" if len(chunks) == 1 else f"model{number}"


def layout() -> dict[str, int | None]:
    """What the random states of a checkpoint are bound to."""
    return {
        "world": dist.get_world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_world_size(),
    }


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


def start_save(
    path: str,
    chunks: Chunks,
    optimizer: MegatronOptimizer,
    schedule: OptimizerParamScheduler,
    *,
    step: int,
    background: bool = False,
    adapters: dict[str, Any] | None = None,
) -> StateWriter:
    """Begin to write the whole training state into the folder `path`, as it is now; `finish` of what is returned ends it. Collective.

    The folder is complete once `metadata.json` is there. With `background` a thread writes copies; else the writing is done on return.
    With `adapters`, what they are, only they are written, and not the model that they stand on.
    """
    written_by_first(lambda: Path(path).mkdir(parents=True, exist_ok=True))
    generators: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(generators, _generators())
    state = _sharded(chunks, optimizer, loading=False, adapters=adapters is not None)
    state |= {"step": step, "schedule": schedule.state_dict(), "generators": generators, "layout": layout(), "adapters": adapters}
    filesystem_async._results_queue = queue.Queue()  # nothing goes into it: without one Megatron starts a process to hold it
    request = dist_checkpointing.save(state, path, sharded_strategy=Planned(), async_sharded_save=True, async_strategy="mcore")
    assert request is not None
    # The rest was copied on its way: views by Megatron's writer, the optimizer's tensors when they were gathered.
    held = {t.untyped_storage().data_ptr() for chunk in chunks for t in (*chunk.parameters(), *chunk.module.buffers())}
    return StateWriter(path, request, held=held if background else None)


def load_state(
    path: str,
    chunks: Chunks,
    optimizer: MegatronOptimizer,
    schedule: OptimizerParamScheduler,
    *,
    resume: bool = True,
    moments: bool = True,
    adapters: dict[str, Any] | None = None,
) -> tuple[int, bool]:
    """Load what `start_save` wrote. Collective. Returns (optimizer steps done, whether the random states are those asked for).

    With `resume` the run goes on: step count, random states and the schedule's position are the saved ones. Peak rate, style,
    warm-up and length of the schedule are this command line's (a longer --num-rollout stretches the decay), unless
    --use-checkpoint-opt-param-scheduler asks for the saved ones. Random states are bound to a layout: at another one they stay
    as the seed made them. Without `resume` only weights and optimizer moments are taken; the rest is as at the start of a run. So
    it is, and without moments, where `moments` is False or the folder holds weights alone. `adapters` is what this run's adapters are,
    None without.

    Raises CheckpointError for a folder that is missing or torn, ConfigError when the flags make other parameter groups or adapters.
    """
    if not (Path(path) / COMPLETE).is_file():
        raise CheckpointError(f"{path} is no complete trainer state: {COMPLETE}, which is written last, is missing.")
    try:
        common = dist_checkpointing.load_common_state_dict(path)
    except (Exception, CheckpointException) as error:
        raise _unreadable(path, error) from error
    _check_adapters(path, common.get("adapters"), adapters)
    weights_only = not moments or "step" not in common  # these `vime convert`, or Megatron's own trainer, wrote
    try:
        kind = {"adapters": adapters is not None}
        wanted = _sharded_weights(chunks, **kind) if weights_only else _sharded(chunks, optimizer, loading=True, **kind)
        state = dist_checkpointing.load(wanted, path)
    except (Exception, CheckpointException) as error:
        raise _unreadable(path, error) from error
    for number, chunk in enumerate(chunks):
        chunk.module.load_state_dict(state[_name(chunks, number)], strict=False)
    if weights_only:
        optimizer.reload_model_params()
        schedule.num_steps = 0
        schedule.step(0)
        return 0, True
    rates = _take_group_settings(path, state["optimizer"], optimizer)
    with torch.no_grad():
        optimizer.load_state_dict(state["optimizer"])
    schedule.num_steps = 0
    if not resume:
        schedule.step(0)
        return 0, True
    _resume_schedule(path, schedule, state["schedule"], rates)
    same = state["layout"] == layout()
    if same:
        _set_generators(state["generators"][dist.get_rank()])
    return int(state["step"]), same


def _unreadable(path: str, error: BaseException) -> CheckpointError:
    if isinstance(error, CheckpointException):  # what a rank met; the exception itself is its traceback
        error = next(iter(error.failures.values()))[0]
    said = " ".join(str(error).split())[:300]
    return CheckpointError(f"{path} cannot be loaded ({type(error).__name__}: {said}). It is torn, or of a model of another shape.")


def _check_adapters(path: str, saved: dict[str, Any] | None, ours: dict[str, Any] | None) -> None:
    """Raise ConfigError unless the checkpoint holds adapters like ours, on the same base model; or none, as we have none."""
    if saved is None and ours is None:
        return
    if ours is None:
        raise ConfigError(f"{path} holds adapters of rank {saved['rank']} and no model: give --lora-rank {saved['rank']}.")  # type: ignore[index]
    if saved is None:
        raise ConfigError(
            f"{path} holds a model without adapters: leave --lora-rank out, or make a Hugging Face folder of it, for --hf-checkpoint."
        )
    flags = {"rank": "--lora-rank", "alpha": "--lora-alpha", "targets": "--lora-target-modules"}
    other = [f"{flag} {ours[name]} is {saved[name]} there" for name, flag in flags.items() if ours[name] != saved[name]]
    if ours["base"] != saved["base"]:
        other.append("--hf-checkpoint holds other weights than those that they were trained on")
    if other:
        raise ConfigError(f"{path} holds other adapters: {'; '.join(other)}.")


def _saved_groups(state: dict[Any, Any]) -> list[dict[str, Any]]:
    """The parameter groups in an optimizer's state, however deep they stand."""
    if "param_groups" in state:
        return list(state["param_groups"])
    return [group for part in state.values() if isinstance(part, dict) for group in _saved_groups(part)]


def _take_group_settings(path: str, state: dict[str, Any], optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """Put this run's settings (rates, betas, ...) into the saved parameter groups, whose step counts and parameters stay.

    Megatron finds a group by its settings, peak rate included: with another --lr it would not find any. Returns what the
    groups said about the schedule.
    """
    saved, ours = _saved_groups(state), optimizer.param_groups
    if len(saved) != len(ours):
        raise ConfigError(
            f"{path} was saved with {len(saved)} parameter groups and these flags make {len(ours)}: "
            "give the --decoupled-lr and weight-decay flags of the run that saved it."
        )
    rates = [{name: group[name] for name in SCHEDULED if name in group} for group in saved]
    for group, own in zip(saved, ours, strict=True):
        group.update({name: value for name, value in own.items() if name not in ("params", "step")})
    return rates


def _resume_schedule(path: str, schedule: OptimizerParamScheduler, saved: dict[str, Any], rates: list[dict[str, Any]]) -> None:
    """Move the schedule to the saved number of steps; say once which of its settings are not the saved ones."""
    if schedule.use_checkpoint_opt_param_scheduler:
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
            group.update(rate)
    else:
        own = schedule.state_dict()
        changed = [f"{name} {saved[name]} -> {own[name]}" for name in own if name != "num_steps" and saved.get(name) != own[name]]
        if changed and dist.get_rank() == 0:
            log.warning(
                "the schedule follows this command line, not %s: %s; the %d optimizer steps done count as before",
                path, ", ".join(changed), saved["num_steps"],
            )  # fmt: skip
    schedule.load_state_dict(saved)
