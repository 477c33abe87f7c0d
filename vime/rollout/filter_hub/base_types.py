"""What a dynamic filter returns."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DynamicFilterOutput"]


@dataclass(slots=True)
class DynamicFilterOutput:
    """Keep the group or drop it; `reason` is counted under rollout/dynamic_filter/drop_{reason}."""

    keep: bool
    reason: str | None = None
