"""The shape of one packed micro-batch, as Megatron's layers get it, and how the CPU attention walks through it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from vime.packing.computed import ComputedRow
from vime.packing.pack import PackedBatch

__all__ = ["AttentionPlan", "PackedParams", "attention_plan", "computed_params", "packed_params"]

PADDING_ALLOWED = 1.25  # padded rows per real row within one group of sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Sequences of similar length, laid out as rows of a few rectangles so that one SDPA call serves many of them.

    The rectangles [b, m] follow one another in one flat row of S slots. T = tokens that are computed; one that several
    sequences share stands in a slot of each, and the first of these gives its output.
    """

    shapes: tuple[tuple[int, int], ...]  # (b, m) of each rectangle
    slot_to_token: torch.Tensor  # [S] i64; padding slots hold any token: causal attention never reads them
    token_to_slot: torch.Tensor  # [T] i64, the slot that gives the token's output
    slot_gives: torch.Tensor  # [S] i64, the token to which the slot gives its output; T for nobody's
    shared_slots: torch.Tensor | None = None  # [slots without padding] i64, token after token; None when no token is shared
    shared_starts: torch.Tensor | None = None  # [T] i64, where in `shared_slots` each token's slots begin


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's parameters of a packed batch, plus the plan for the CPU kernel.

    With Transformer Engine `qkv_format` is "thd". Without it the pack travels as one row of T tokens ("sbhd", b = 1):
    positions then come from `position_ids` (see `model.PackedGPTModel`) and only the core attention sees the borders.
    """

    plan: AttentionPlan | None = None
    rows: torch.Tensor | None = None  # [N] i64: the only ones that the last layer hands on (`layer_spec.LastLayer`); None = all


def attention_plan(cu_seqlens: torch.Tensor, source: torch.Tensor | None = None) -> AttentionPlan:
    """Group the sequences of `cu_seqlens` [n + 1] by length, so that padding stays below a quarter of each group.

    `source` [E = cu_seqlens[-1]] i64 says which computed token each token of the sequences is, when some are shared: every
    number from 0 to its maximum occurs. None = each is its own.
    """
    starts, lengths = cu_seqlens[:-1].long(), (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    order = torch.argsort(lengths, descending=True, stable=True)
    sorted_lengths = lengths[order].tolist()
    total = int(cu_seqlens[-1])
    shapes, slots = [], []
    begin = 0
    while begin < len(sorted_lengths):
        longest, real, end = sorted_lengths[begin], 0, begin
        while end < len(sorted_lengths) and longest * (end - begin + 1) <= PADDING_ALLOWED * (real + sorted_lengths[end]):
            real += sorted_lengths[end]
            end += 1
        rows = order[begin:end]
        offsets = torch.arange(longest)
        inside = offsets[None, :] < lengths[rows][:, None]
        slots.append(torch.where(inside, starts[rows][:, None] + offsets[None, :], total).flatten())
        shapes.append((end - begin, longest))
        begin = end
    place = torch.cat(slots)  # [S] the token of the sequences in each slot, `total` in padding
    slot_of = torch.empty(total + 1, dtype=torch.int64)
    slot_of[place] = torch.arange(len(place))
    slot_of = slot_of[:total]
    shared: dict[str, torch.Tensor] = {}
    slot_to_token, token_to_slot = place.where(place < total, 0), slot_of
    if source is not None:
        slot_to_token = source[slot_to_token]
        counts = torch.bincount(source)
        by_token = slot_of[torch.argsort(source, stable=True)]
        first = counts.cumsum(0) - counts
        token_to_slot = by_token[first]
        if len(counts) < total:
            shared = {"shared_slots": by_token, "shared_starts": first}
    slot_gives = torch.full((len(place),), len(token_to_slot), dtype=torch.int64)
    slot_gives[token_to_slot] = torch.arange(len(token_to_slot))
    return AttentionPlan(shapes=tuple(shapes), slot_to_token=slot_to_token, token_to_slot=token_to_slot, slot_gives=slot_gives, **shared)


def packed_params(packed: PackedBatch, *, thd: bool) -> PackedParams:
    """Megatron's view of the whole of `packed`. `thd`: for Transformer Engine's layers."""
    cu_seqlens = packed.cu_seqlens
    return PackedParams(
        qkv_format="thd" if thd else "sbhd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=packed.max_seqlen,
        max_seqlen_kv=packed.max_seqlen,
        plan=attention_plan(cu_seqlens) if cu_seqlens.device.type == "cpu" else None,
    )


def computed_params(computed: ComputedRow) -> PackedParams:
    """Megatron's view of what is computed of a packed batch, for the CPU kernel."""
    cu_seqlens = computed.cu_seqlens
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    return PackedParams(
        qkv_format="sbhd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        plan=attention_plan(cu_seqlens, computed.source),
        rows=computed.rows,
    )
