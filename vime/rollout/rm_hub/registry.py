"""The built-in rewards by name: the only place where the names occur."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from vime.errors import ConfigError
from vime.utils.types import Sample

__all__ = ["REWARDS", "RewardSpec", "find_reward", "needs_label"]


def _nothing(args: Any, sample: Sample) -> str:
    return ""


def _lacks_choice(args: Any, sample: Sample) -> str:
    right = sample.label if sample.label is not None else sample.metadata.get("correct_letter")
    return "" if str(right or "").strip() else "needs a label, or the right letter in metadata['correct_letter']. Give one or drop the row."


def _lacks_task(args: Any, sample: Sample) -> str:
    task = sample.metadata.get("reasoning_gym")
    if not isinstance(task, dict) or not task.get("dataset"):
        return 'needs metadata {"reasoning_gym": {"dataset": name, "entry": {...}}}. Write it as the dataset made it, or drop the row.'
    entry = task.get("entry")
    if entry and not isinstance(entry, dict):
        return f"needs an object in metadata['reasoning_gym']['entry'] (the item as the dataset made it), got {type(entry).__name__}."
    if not entry and sample.label is None:
        return "needs metadata['reasoning_gym']['entry'] (the item as the dataset made it), or a label: its answer (--label-key)."
    return ""


def _lacks_address(args: Any, sample: Sample) -> str:
    given = sample.metadata.get("rm_url") or args.rm_url
    return "" if given else "needs an address: --rm-url, or metadata['rm_url'] in the row."


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """One built-in reward.

    Rules are `score(response, label, metadata) -> float | dict` in `module`; quick ones run where they are called
    ("here"), heavy ones in a worker process. A "sample" reward is `async score_sample(args, sample)`.
    """

    module: str
    runs: Literal["here", "worker", "sample"] = "here"
    label: bool = True  # cannot do without a label
    entries: tuple[str, ...] | None = ()  # of the dict that it gives; () = it gives a number, None = either, with any entries
    lacks: Callable[[Any, Sample], str] = _nothing  # (args, sample of a prompt file) -> what else it lacks, with the cure; or ""

    def function(self) -> Any:
        """The scoring function; imports its module."""
        module = importlib.import_module(f"vime.rollout.rm_hub.{self.module}")
        return module.score_sample if self.runs == "sample" else module.score


REWARDS: Mapping[str, RewardSpec] = MappingProxyType(
    {
        "dapo": RewardSpec(module="dapo", entries=("score", "acc", "pred")),
        "deepscaler": RewardSpec(module="deepscaler", runs="worker"),
        "exact": RewardSpec(module="exact"),
        "f1": RewardSpec(module="f1"),
        "gpqa": RewardSpec(module="gpqa", label=False, lacks=_lacks_choice),  # metadata["correct_letter"] serves as well
        "math": RewardSpec(module="math_rm", runs="worker"),
        "random": RewardSpec(module="random_rm", runs="sample", label=False),
        "reasoning_gym": RewardSpec(module="reasoning_gym_rm", runs="worker", label=False, lacks=_lacks_task),
        "remote_rm": RewardSpec(module="remote_rm", runs="sample", label=False, entries=None, lacks=_lacks_address),
    }
)


def find_reward(name: str, flag: str = "--rm-type") -> RewardSpec:
    """The reward called `name` (a `boxed_` prefix apart).

    Raises:
        ConfigError: there is none; the message lists the nearest names and all of them.
    """
    bare = name.removeprefix("boxed_")
    if bare not in REWARDS:
        near = difflib.get_close_matches(bare, REWARDS, n=2)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise ConfigError(f"{flag} {name}: there is no such reward{hint} Known: {', '.join(REWARDS)} (each also with the prefix boxed_).")
    return REWARDS[bare]


def needs_label() -> frozenset[str]:
    """Names of the rewards that cannot do without a label."""
    return frozenset(name for name, spec in REWARDS.items() if spec.label)
