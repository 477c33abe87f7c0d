"""The built-in rewards by name: the only place where the names occur."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from vime.errors import ConfigError

__all__ = ["REWARDS", "RewardSpec", "find_reward", "needs_label"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """One built-in reward.

    Rules are `score(response, label, metadata) -> float | dict` in `module`; quick ones run where they are called
    ("here"), heavy ones in a worker process. A "sample" reward is `async score_sample(args, sample)`.
    """

    module: str
    runs: Literal["here", "worker", "sample"] = "here"
    label: bool = True  # cannot do without a label

    def function(self) -> Any:
        """The scoring function; imports its module."""
        module = importlib.import_module(f"vime.rollout.rm_hub.{self.module}")
        return module.score_sample if self.runs == "sample" else module.score


REWARDS: Mapping[str, RewardSpec] = MappingProxyType(
    {
        "dapo": RewardSpec(module="dapo"),
        "deepscaler": RewardSpec(module="deepscaler", runs="worker"),
        "exact": RewardSpec(module="exact"),
        "f1": RewardSpec(module="f1"),
        "gpqa": RewardSpec(module="gpqa", label=False),  # metadata["correct_letter"] serves as well
        "math": RewardSpec(module="math_rm", runs="worker"),
        "random": RewardSpec(module="random_rm", runs="sample", label=False),
        "reasoning_gym": RewardSpec(module="reasoning_gym_rm", runs="worker", label=False),
        "remote_rm": RewardSpec(module="remote_rm", runs="sample", label=False),
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
