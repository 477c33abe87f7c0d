"""What a rollout function returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vime.utils.types import Sample

__all__ = ["Group", "RolloutFnEvalOutput", "RolloutFnTrainOutput"]

Group = list[Sample | list[Sample]]  # members of one prompt; a fan-out member is the list of its segments


@dataclass(slots=True)
class RolloutFnTrainOutput:
    """Groups to train on, ordered by group_index, and what to log of the rollout."""

    samples: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class RolloutFnEvalOutput:
    """Per held-out file: `{"rewards": list[float], "truncated": list[bool], "samples": list[Sample]}`, and what to log."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, float] = field(default_factory=dict)
