"""Invertible steps between the tensors of a Hugging Face folder and one Megatron parameter.

Each op knows both names and all shapes. Four functions, each pair inverse to one another:
`fuse` / `split` (HF tensors <-> the whole Megatron parameter) and `shard` / `merge` (the whole <-> its tensor-parallel parts).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["QKV", "Copy", "GateUp", "GatedQKV", "Op", "Sections", "Shard", "Vocabulary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One Megatron parameter and the HF tensors it is made of. The base copies, and every rank holds the whole."""

    megatron: str  # parameter name in Megatron's local spec, layers and experts numbered over the whole model
    hf: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    is_expert: bool = False  # cut over the expert-tensor-parallel ranks instead of the tensor-parallel ones

    def fuse(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """HF tensors, in the order of `hf`, to the whole Megatron parameter."""
        return parts[0]

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `fuse`."""
        return [whole]

    def shard(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """What tensor-parallel rank `rank` of `size` holds."""
        return whole

    def merge(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse of `shard`, from all ranks' parts in order."""
        return shards[0]

    @property
    def is_sharded(self) -> bool:
        """Ranks hold different parts."""
        return type(self).shard is not Op.shard

    @property
    def num_elements(self) -> int:
        """Of the HF tensors together."""
        return sum(math.prod(shape) for shape in self.hf_shapes)

    def shard_shape(self, size: int) -> tuple[int, ...]:
        """The shape of one of `size` shards."""
        whole = self.fuse([torch.empty(shape, device="meta") for shape in self.hf_shapes])
        return tuple(self.shard(whole, 0, size).shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(Op):
    """The same tensor on both sides, whole on every rank (norms)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard(Op):
    """The same tensor on both sides, cut along `dim`: 0 for column-parallel, 1 for row-parallel layers."""

    dim: int

    def shard(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        return whole.chunk(size, self.dim)[rank]

    def merge(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(shards), self.dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary(Op):
    """Embedding or output layer: zero rows up to `padded` at the end, cut along the rows."""

    padded: int

    def fuse(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        rows = self.padded - parts[0].shape[0]
        return torch.cat([parts[0], parts[0].new_zeros(rows, *parts[0].shape[1:])]) if rows else parts[0]

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole[: self.hf_shapes[0][0]]]

    def shard(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        return whole.chunk(size)[rank]

    def merge(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(shards))


@dataclass(frozen=True, slots=True, kw_only=True)
class QKV(Op):
    """q, k, v (weights or biases) interleaved per key/value group: [group: its queries, key, value], cut between groups."""

    groups: int
    head_dim: int

    def fuse(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        rest = parts[0].shape[1:]
        return torch.cat([part.reshape(self.groups, -1, *rest) for part in parts], dim=1).reshape(-1, *rest)

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        rest = whole.shape[1:]
        per_group = whole.reshape(self.groups, -1, *rest)
        sizes = [per_group.shape[1] - 2 * self.head_dim, self.head_dim, self.head_dim]
        return [part.reshape(-1, *rest) for part in per_group.split(sizes, dim=1)]

    def shard(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        return whole.chunk(size)[rank]

    def merge(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(shards))


@dataclass(frozen=True, slots=True, kw_only=True)
class GateUp(Op):
    """gate and up projection stacked; each rank stacks its own parts of both."""

    def fuse(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(whole.chunk(2))

    def shard(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        return torch.cat([part.chunk(size)[rank] for part in whole.chunk(2)])

    def merge(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedQKV(QKV):
    """The same where q holds, head by head, a query and the gate of its output: [group: its queries, their gates, key, value]."""

    def fuse(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        rest = parts[0].shape[1:]
        queries = parts[0].reshape(self.groups, -1, 2, self.head_dim, *rest).transpose(1, 2)
        return QKV.fuse(self, [queries.reshape(-1, *rest), *parts[1:]])

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        rest = whole.shape[1:]
        queries, key, value = QKV.split(self, whole)
        return [queries.reshape(self.groups, 2, -1, self.head_dim, *rest).transpose(1, 2).reshape(-1, *rest), key, value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections(Op):
    """Tensors stacked along the rows; each rank stacks its own part of each of the `sections` (numbers of rows)."""

    sections: tuple[int, ...]

    def fuse(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(whole.split([shape[0] for shape in self.hf_shapes]))

    def shard(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        return torch.cat([part.chunk(size)[rank] for part in whole.split(list(self.sections))])

    def merge(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        cut = [shard.split([rows // len(shards) for rows in self.sections]) for shard in shards]
        return torch.cat([part for section in zip(*cut, strict=True) for part in section])
