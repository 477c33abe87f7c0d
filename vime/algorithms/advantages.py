"""From the samples of one rollout step to an advantage per response token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vime.algorithms.registry import ADVANTAGES
from vime.algorithms.whitening import masked_sums, whiten
from vime.config.sections import AlgorithmConfig
from vime.types import TrainSample

__all__ = ["compute_advantages"]


def compute_advantages(
    samples: Sequence[TrainSample],
    algorithm: AlgorithmConfig,
    *,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """One f32 [R] tensor a sample, of this rank's samples of a whole rollout step.

    With --normalize-advantages they are whitened over the trained tokens of all ranks: `sum_over_ranks` must then add a
    [3] float64 tensor up over the data-parallel ranks and return the sum (None = there is one rank).
    """
    advantages = ADVANTAGES[algorithm.advantage_estimator].function(samples)
    if not algorithm.normalize_advantages:
        return advantages
    masks = [torch.tensor(s.loss_mask) for s in samples]
    sums = masked_sums(torch.cat(advantages), torch.cat(masks)) if samples else torch.zeros(3, dtype=torch.float64)
    if sum_over_ranks is not None:
        sums = sum_over_ranks(sums)
    return [whiten(values, sums) for values in advantages]
