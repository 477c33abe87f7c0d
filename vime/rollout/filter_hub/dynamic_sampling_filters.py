"""Ready-made dynamic filters (`--dynamic-sampling-filter-path`)."""

from __future__ import annotations

import statistics
from typing import Any

from vime.rollout.filter_hub.base_types import DynamicFilterOutput
from vime.utils.types import Sample

__all__ = ["check_reward_nonzero_std"]


def check_reward_nonzero_std(args: Any, samples: list[Sample], **_: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ: the others have no advantage to learn from.

    This is the dynamic sampling of DAPO (arXiv 2503.14476, equation 11's constraint): a group is kept when the standard
    deviation of its rewards exceeds 1e-6. Failed members are not among `samples`.
    """
    rewards = [sample.get_reward_value(args) for sample in samples]
    if rewards and statistics.pstdev(rewards) > 1e-6:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1) if rewards else 'empty'}")
