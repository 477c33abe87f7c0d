"""Advantages shifted to mean 0 and scaled to variance 1 over all trained tokens of a batch.

"Implementation details of PPO" (Huang et al., ICLR blog 2022, detail 7): A <- (A - mean(A)) / sqrt(var(A) + 1e-8). The
variance is the unbiased one. The sums are returned apart so that a caller can add them up over data-parallel ranks.
"""

from __future__ import annotations

import torch

__all__ = ["masked_sums", "whiten"]


def masked_sums(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[3] float64: count, sum and sum of squares of `values` [...] where `mask` [...] is 1. Additive over ranks."""
    x, m = values.double(), mask.double()
    return torch.stack([m.sum(), (m * x).sum(), (m * x * x).sum()])


def whiten(values: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """(values - mean) / sqrt(var + 1e-8) with the statistics in `sums` [3]; same shape and dtype as `values`.

    With fewer than two counted values there is no variance: the mean is subtracted and nothing divided.
    """
    count, total, squares = sums.tolist()
    if count < 2:
        return values - total / max(count, 1)
    mean = total / count
    variance = max(squares - count * mean * mean, 0.0) / (count - 1)
    return ((values.double() - mean) / (variance + 1e-8) ** 0.5).to(values.dtype)
