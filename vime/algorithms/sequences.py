"""Which positions of a packed row belong to which sequence, and sums over each: for ratios and masks of whole sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Sequences"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """n sequences over T positions."""

    ids: torch.Tensor  # [T] i64: 0 ... n - 1, or -1 for positions of none
    mask: torch.Tensor  # [T] 1 = counts
    count: int  # n

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """[n]: the sum of `values` [T] over the counted positions of each sequence."""
        zeros = values.new_zeros(self.count + 1)  # the last bin takes the positions of none
        return zeros.index_add(0, self.ids % (self.count + 1), values * self.mask.to(values.dtype))[:-1]

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """[n]: the mean over the counted positions; 0 for a sequence without any."""
        return self.sums(values) / self.sums(torch.ones_like(values)).clamp(min=1)

    def spread(self, per_sequence: torch.Tensor) -> torch.Tensor:
        """[T]: each position's value of its sequence [n]; 0 where it belongs to none."""
        return torch.cat([per_sequence, per_sequence.new_zeros(1)])[self.ids % (self.count + 1)]
