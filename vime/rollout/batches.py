"""From what a rollout function returned to the trainers' batches, with the user's hooks on the way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vime.config import RunConfig
from vime.errors import HookError
from vime.hooks import hook_errors, load_hook
from vime.packing.build import build_train_batches
from vime.types import TrainBatch
from vime.utils.types import Sample

__all__ = ["flat_samples", "own_function", "train_batches"]


def train_batches(config: RunConfig, args: Any, samples: list[Sample], rollout_id: int) -> list[TrainBatch]:
    """One batch a data-parallel rank; `args` is the run's flat view. Raises as `build_train_batches`, and HookError."""
    return build_train_batches(
        samples,
        rollout_id=rollout_id,
        data=config.packed_data,
        algorithm=config.algorithm,
        reward=config.reward,
        dp_size=config.data_parallel_size,
        args=args,
        processed_rewards=own_function(args.custom_reward_post_process_path, "custom_reward_post_process_path", args, samples),
        train_data=own_function(args.custom_convert_samples_to_train_data_path, "custom_convert_samples_to_train_data_path", args, samples),
    )


def own_function(path: str | None, kind: str, *values: Any) -> Any:
    """What the user's function of this kind returns; None when there is none. HookError when it raises."""
    if path is None:
        return None
    function = load_hook(path, kind)
    with hook_errors(f"--{kind.replace('_', '-')}", path, function):
        return function(*values)


def flat_samples(groups: Iterable[Any]) -> Iterable[Sample]:
    """Samples of nested groups and fan-outs, in order."""
    for item in groups:
        if isinstance(item, Sample):
            yield item
        elif isinstance(item, list | tuple):
            yield from flat_samples(item)
        else:
            raise HookError(
                f"the rollout function returned a {type(item).__name__} among its samples; right: lists of vime.utils.types.Sample, one "
                "list a group (or a RolloutFnTrainOutput with them)."
            )
