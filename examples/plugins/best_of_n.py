"""A reward that needs the whole group: the best of n is worth 1, and the shortest of several best.

    vime train ... --group-rm --custom-rm-path examples.plugins.best_of_n.best_of_n \
        --dynamic-sampling-filter-path examples.plugins.best_of_n.has_a_winner
"""

from __future__ import annotations

import re
from typing import Any

from vime.rollout.filter_hub.base_types import DynamicFilterOutput
from vime.utils.types import Sample


def distance(sample: Sample) -> float:
    """How far the last number of the response is from the label; infinite without a number."""
    numbers = re.findall(r"-?\d+", sample.response)
    return abs(int(numbers[-1][:18]) - int(sample.label)) if numbers else float("inf")


async def best_of_n(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    """1 for the member that is nearest to the label, the shortest of equals and then the first; 0 for all others and without a number."""
    best = min(samples, key=lambda sample: (distance(sample), sample.response_length, sample.index))
    winner = None if distance(best) == float("inf") else best
    return [float(sample is winner) for sample in samples]


def has_a_winner(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Drop groups in which nobody wrote a number."""
    keep = any(sample.get_reward_value(args) > 0 for sample in samples)
    return DynamicFilterOutput(keep=keep, reason=None if keep else "no_winner")
