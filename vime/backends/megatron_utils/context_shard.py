"""What one context-parallel rank computes of a packed batch, and which keys its queries see.

Each sequence is padded to 2 x size equal chunks, of which rank r takes the chunks r and 2 size - 1 - r: with causal attention
all ranks then have the same work. A rank gathers the keys of all ranks and attends to what precedes each of its chunks. The
batch itself stays whole: padding is nowhere but here, and log-probs come back at their places in the pack (`loss`).

    one sequence, size 2      tokens 0 1 2 3 4 5 - -     rank 0: 0 1 | - -      rank 1: 2 3 | 4 5
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from vime.packing.pack import PackedBatch

__all__ = ["ContextShard", "context_shard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextShard:
    """C positions of this rank, chunk after chunk; T = positions of the whole pack."""

    at: torch.Tensor  # [C] i64: the place of each in the pack; T for padding
    tokens: torch.Tensor  # [C] i64
    position_ids: torch.Tensor  # [C] i64, in the own sequence
    keys: torch.Tensor  # [K] i64: for each chunk what it sees, in the keys of all ranks one after the other, [size x C]
    cu_queries: torch.Tensor  # [2 n + 1] i32, starts of the chunks in C
    cu_keys: torch.Tensor  # [2 n + 1] i32, starts of what they see in `keys`
    cu_padded: torch.Tensor  # [n + 1] i32, starts of the padded sequences of all ranks together
    query_sizes: tuple[int, ...]  # of the 2 n chunks
    key_sizes: tuple[int, ...]  # of what each sees
    longest: int  # tokens of the longest padded sequence
    num_tokens: int  # T

    def rows(self, wanted: torch.Tensor) -> torch.Tensor:
        """[M >= 1] i64: where in C the positions `wanted` [N] of the pack are; the first of C where this rank has none of them."""
        seen = torch.zeros(self.num_tokens + 1, dtype=torch.bool, device=self.at.device).index_fill(0, wanted, True)
        found = seen[self.at].nonzero().squeeze(-1)
        return found if len(found) else torch.zeros(1, dtype=torch.int64, device=self.at.device)

    def to(self, device: torch.device) -> ContextShard:
        """A copy with all tensors on `device`."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(device, non_blocking=True) for k, v in moved.items() if isinstance(v, torch.Tensor)})


def _cumulative(sizes: torch.Tensor) -> torch.Tensor:
    return F.pad(sizes.cumsum(0), (1, 0))


def context_shard(packed: PackedBatch, *, rank: int, size: int, multiple_of: int = 1) -> ContextShard:
    """The shard of context-parallel `rank` of `size`; C is a multiple of `multiple_of` (the sequence-parallel ranks).

    `packed` must have no padding sequence.
    """
    lengths = torch.tensor(packed.lengths)
    chunk = -(-lengths // (2 * size))
    while int(2 * chunk.sum()) % multiple_of:
        chunk[-1] += 1
    count = int(2 * chunk.sum())
    chunks = chunk.repeat_interleave(2)  # [2 n], of this rank
    number = torch.tensor([rank, 2 * size - 1 - rank]).repeat(len(lengths))
    begins, cu_queries = number * chunks, _cumulative(chunks)
    inside = torch.arange(count) - cu_queries[:-1].repeat_interleave(chunks)
    position = begins.repeat_interleave(chunks) + inside
    sequence = torch.arange(len(lengths)).repeat_interleave(2 * chunk)
    at = (_cumulative(lengths)[sequence] + position).where(position < lengths[sequence], packed.num_tokens)
    ends = begins + chunks
    return ContextShard(
        at=at,
        tokens=F.pad(packed.tokens.cpu(), (0, 1))[at],
        position_ids=position,
        keys=_keys(chunk, ends, size=size, count=count),
        cu_queries=cu_queries.int(),
        cu_keys=_cumulative(ends).int(),
        cu_padded=_cumulative(2 * size * chunk).int(),
        query_sizes=tuple(chunks.tolist()),
        key_sizes=tuple(ends.tolist()),
        longest=int(2 * size * chunk.max()),
        num_tokens=packed.num_tokens,
    ).to(packed.tokens.device)


def _keys(chunk: torch.Tensor, ends: torch.Tensor, *, size: int, count: int) -> torch.Tensor:
    """Of each chunk the positions 0 .. its end, as places in the gathered keys: rank q has its chunk of a sequence at q x count + ..."""
    seen = torch.arange(int(ends.sum())) - _cumulative(ends)[:-1].repeat_interleave(ends)  # position in the sequence
    sequence = torch.arange(len(chunk)).repeat_interleave(2).repeat_interleave(ends)
    width, number = chunk[sequence], seen // chunk[sequence]
    first = number < size
    owner = number.where(first, 2 * size - 1 - number)
    start = 2 * _cumulative(chunk)[sequence] + width.where(~first, 0)
    return owner * count + start + seen % width
