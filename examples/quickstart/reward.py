"""The quickstart's reward: reasoning-gym's verifier, full marks only.

The verifier gives partial credit to a text that merely contains the right number. A policy trained on that learnt within ten steps to
answer with eight random digits (seen on chain_sum: mean score 0.05, not one right answer), so only full marks count.
"""

from __future__ import annotations

from typing import Any

import reasoning_gym

from vime.utils.types import Sample

__all__ = ["verified"]


async def verified(args: Any, sample: Sample) -> float:
    """1.0 when the dataset's own verifier accepts the response in full, else 0.0. A hook for --custom-rm-path."""
    task = sample.metadata["reasoning_gym"]
    score = reasoning_gym.get_score_answer_fn(task["dataset"])(sample.response.strip(), task["entry"])
    return float(score == 1.0)
