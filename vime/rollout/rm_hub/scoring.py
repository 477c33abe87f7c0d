"""Which reward scores a sample, and the check that what it gave is a reward."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from vime.errors import ConfigError, DataError, HookError, RewardError
from vime.hooks import hook_errors, load_hook
from vime.rollout.rm_hub.answers import last_boxed
from vime.rollout.rm_hub.registry import find_reward
from vime.rollout.rm_hub.workers import RewardWorkers
from vime.utils.types import Sample

__all__ = ["REWARD_RESOURCES", "async_rm", "batched_async_rm"]


class RewardResources(Protocol):
    """What rewards use of what a run's rollouts share."""

    @property
    def reward_workers(self) -> RewardWorkers: ...

    @property
    def hooks(self) -> dict[tuple[str, str], Any]: ...


# Those of the rollout that runs in this task; set by GenerateState for the tasks of one rollout, and weak for its reason.
REWARD_RESOURCES: ContextVar[weakref.ref[RewardResources] | None] = ContextVar("vime_reward_resources", default=None)


def _shared() -> RewardResources | None:
    reference = REWARD_RESOURCES.get()
    return reference() if reference is not None else None


FLAG = "--custom-rm-path"


async def async_rm(args: Any, sample: Sample, evaluation: bool = False) -> float | dict[str, Any]:
    """The reward of one sample.

    The first of these that is set decides: `sample.custom_rm_path`, `--custom-rm-path`, `sample.metadata["rm_type"]`,
    `--rm-type`.

    Raises:
        RewardError: the reward is None, not a finite number, or a dict without the key that --reward-key names.
        HookError: a custom reward raised. ConfigError: no reward is configured. DataError: no label, though it needs one.
        GenerationError, EngineError, DeadlineError: the judge failed; the sample is left out, not scored 0.
    """
    path = sample.custom_rm_path or args.custom_rm_path
    if path:
        function = _custom(path)
        with hook_errors(FLAG, path, function):
            value = await function(args, sample)
        return _checked(value, args, sample, path, evaluation)
    name = sample.metadata.get("rm_type") or args.rm_type
    if not name:
        raise ConfigError(
            "No reward: neither --rm-type nor --custom-rm-path is given, and the prompt has no metadata['rm_type']. See docs/rewards.md."
        )
    return _checked(await _builtin(args, sample, str(name)), args, sample, str(name), evaluation)


async def batched_async_rm(args: Any, samples: Sequence[Sample], evaluation: bool = False) -> list[float | dict[str, Any]]:
    """The rewards of several samples, in order. `--custom-rm-path` is called once with the whole list (as --group-rm asks)."""
    path = args.custom_rm_path
    if not path or any(sample.custom_rm_path for sample in samples):
        return list(await asyncio.gather(*(async_rm(args, sample, evaluation) for sample in samples)))
    function = _custom(path)
    with hook_errors(FLAG, path, function):
        values = await function(args, list(samples))
    if not isinstance(values, Sequence) or len(values) != len(samples):
        got = f"{len(values)} rewards" if isinstance(values, Sequence) else type(values).__name__
        raise HookError(f"{FLAG} {path}: with --group-rm it must return a list of {len(samples)} rewards, one per sample; got {got}.")
    return [_checked(value, args, sample, path, evaluation) for value, sample in zip(values, samples, strict=True)]


def _custom(path: str) -> Any:
    """The custom reward at `path`; loaded and checked once a run."""
    shared = _shared()
    if shared is None:
        return load_hook(path, "custom_rm_path", FLAG)
    key = (path, "custom_rm_path")
    if key not in shared.hooks:
        shared.hooks[key] = load_hook(*key, FLAG)
    return shared.hooks[key]


async def _builtin(args: Any, sample: Sample, name: str) -> Any:
    spec = find_reward(name, "--rm-type" if name == args.rm_type else "metadata['rm_type']")
    if spec.label and sample.label is None:
        raise DataError(
            f"sample {sample.index}: reward '{name}' compares with a label, and the sample has none. Name its column with --label-key."
        )
    if spec.runs == "sample":
        return await spec.function()(args, sample)
    response = sample.response
    if name.startswith("boxed_"):
        response = last_boxed(response) or ""
    if spec.runs == "here":
        return spec.function()(response, sample.label, sample.metadata)
    bare = name.removeprefix("boxed_")
    shared = _shared()
    if shared is not None:
        return await shared.reward_workers.score(bare, response, sample.label, sample.metadata)
    own = RewardWorkers(count=1)
    try:
        return await own.score(bare, response, sample.label, sample.metadata)
    finally:
        await asyncio.to_thread(own.close)


def _checked(value: Any, args: Any, sample: Sample, source: str, evaluation: bool) -> float | dict[str, Any]:
    """`value` as a float, or the dict when its entry under the reward key is one."""
    who = f"sample {sample.index} (group {sample.group_index}): reward '{source}'"
    if isinstance(value, dict):
        key = (args.eval_reward_key if evaluation else None) or args.reward_key
        if key is None:
            raise RewardError(f"{who} gave a dict ({', '.join(map(str, value))}); say with --reward-key which entry is the number.")
        if key not in value:
            raise RewardError(f"{who} gave a dict without the key '{key}' (it has {', '.join(map(str, value))}). Mend --reward-key.")
        return {**value, key: _finite(value[key], f"{who} under '{key}'")}
    return _finite(value, who)


def _finite(value: Any, who: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, str):
        raise RewardError(
            f"{who} gave {value!r}, which is not a finite number. "
            "Return a float; raise vime.errors.GenerationError when a sample cannot be judged."
        )
    return number
