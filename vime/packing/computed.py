"""Which positions of a packed batch have to be computed: those that a wanted log-prob looks at, and shared prompts once.

A position looks at itself and at what precedes it in its sequence. So nothing behind the last wanted position of a sequence
is computed, and samples whose prompts are equal token by token (a group's) share the prompt's hidden states: they are the
same numbers. Losses and gradients are those of the whole pack; only the order of the additions differs.

    tokens    5 9 2 17 1 | 5 9 3 1       prompts 5 9, responses 2 17 1 and 3 1; wanted: what predicts the responses
    computed  5 9 2 17   |     3         17 predicts 1 and 3 predicts 1; the last tokens predict nothing
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vime.packing.pack import PackedBatch

__all__ = ["ComputedRow", "computed_row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedRow:
    """C positions that are computed, and how n sequences (E tokens, shared ones counted in each) are read from them."""

    tokens: torch.Tensor  # [C] i64
    position_ids: torch.Tensor  # [C] i64
    rows: torch.Tensor  # [N] i64, where in C the wanted positions are, in their order, then repetitions
    cu_seqlens: torch.Tensor  # [n + 1] i32, starts of the sequences and E
    source: torch.Tensor  # [E] i64, where in C each token of each sequence is


def computed_row(packed: PackedBatch, wanted: torch.Tensor) -> ComputedRow:
    """The least that has to be computed for the positions `wanted` [N >= 1] i64 of `packed`, which is on the CPU.

    Sequences without a wanted position are left out. C and N are rounded up by at most a sixteenth, so that they take few
    values and kernels made for a shape serve again: what is added is a sequence of its own, and rows that repeat row 0.
    Deterministic: positions keep their order in the pack.
    """
    sizes = (packed.cu_seqlens[1:] - packed.cu_seqlens[:-1]).long()
    starts = packed.cu_seqlens[:-1].long()
    sequence = torch.arange(len(sizes)).repeat_interleave(sizes)
    needed = torch.zeros_like(sizes).scatter_reduce_(0, sequence[wanted], packed.position_ids[wanted] + 1, "amax")
    alive = packed.position_ids < needed[sequence]
    owner = torch.from_numpy(_owners(packed, starts.tolist(), needed.tolist()))
    first = alive & (owner == torch.arange(len(owner)))
    index = first.cumsum(0) - 1
    count = int(index[-1]) + 1
    added = torch.arange(_rounded(count) - count)
    lengths = torch.cat([needed[needed > 0], torch.tensor([len(added)])]) if len(added) else needed[needed > 0]
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cu_seqlens[1:] = lengths.cumsum(0)
    rows = index[owner[wanted]]
    return ComputedRow(
        tokens=torch.cat([packed.tokens[first], torch.zeros_like(added)]),
        position_ids=torch.cat([packed.position_ids[first], added]),
        rows=torch.cat([rows, rows[:1].expand(_rounded(len(rows)) - len(rows))]),
        cu_seqlens=cu_seqlens,
        source=torch.cat([index[owner[alive]], count + added]),
    )


def _rounded(count: int) -> int:
    """Up to a multiple of the largest power of two that is at most a sixteenth of it; small numbers stay as they are."""
    step = 1 << max(count.bit_length() - 5, 0)
    return -(-count // step) * step


def _owners(packed: PackedBatch, starts: list[int], needed: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[T] i64: of each position the one that is computed in its place, the same prompt's in the first sample that has it."""
    owner = np.arange(packed.num_tokens, dtype=np.int64)
    tokens = packed.tokens.numpy()
    seen: dict[bytes, int] = {}
    for start, need, length, response in zip(starts, needed, packed.lengths, packed.response_lengths, strict=False):
        prompt = min(length - response, need)  # strict=False: a padding sequence is in `starts` and no sample
        if prompt > 0:
            at = seen.setdefault(tokens[start : start + prompt].tobytes(), start)
            if at != start:
                owner[start : start + prompt] = np.arange(at, at + prompt)
    return owner
