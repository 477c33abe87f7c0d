"""`--rm-type random`: a coin, for tests of the machinery."""

from __future__ import annotations

import random
from typing import Any

from vime.utils.types import Sample

__all__ = ["score_sample"]


async def score_sample(args: Any, sample: Sample) -> float:
    """0.0 or 1.0, drawn from --rollout-seed and the sample's index: the same run draws the same coins."""
    return float(random.Random(f"{args.rollout_seed}/{sample.index}").random() < 0.5)
