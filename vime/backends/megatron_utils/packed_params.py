"""The shape of one packed micro-batch, as Megatron's layers get it, and how the CPU attention walks through it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from vime.packing.pack import PackedBatch

__all__ = ["AttentionPlan", "PackedParams", "attention_plan", "packed_params"]

PADDING_ALLOWED = 1.25  # padded rows per real row within one group of sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Sequences of similar length, laid out as rows of a few rectangles so that one SDPA call serves many of them.

    The rectangles [b, m] follow one another in one flat row of S slots. T = tokens of the pack.
    """

    shapes: tuple[tuple[int, int], ...]  # (b, m) of each rectangle
    slot_to_token: torch.Tensor  # [S] i64; padding slots hold T, the index of an appended row of zeros
    token_to_slot: torch.Tensor  # [T] i64


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's parameters of a packed batch, plus the plan for the CPU kernel.

    With Transformer Engine `qkv_format` is "thd". Without it the pack travels as one row of T tokens ("sbhd", b = 1):
    positions then come from `position_ids` (see `model.PackedGPTModel`) and only the core attention sees the borders.
    """

    plan: AttentionPlan | None = None


def attention_plan(cu_seqlens: torch.Tensor) -> AttentionPlan:
    """Group the sequences of `cu_seqlens` [n + 1] by length, so that padding stays below a quarter of each group."""
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
    slot_to_token = torch.cat(slots)
    token_to_slot = torch.empty(total + 1, dtype=torch.int64)
    token_to_slot[slot_to_token] = torch.arange(len(slot_to_token))
    return AttentionPlan(shapes=tuple(shapes), slot_to_token=slot_to_token, token_to_slot=token_to_slot[:total])


def packed_params(packed: PackedBatch, *, thd: bool) -> PackedParams:
    """Megatron's view of `packed`. `thd`: for Transformer Engine's layers."""
    cu_seqlens = packed.cu_seqlens
    return PackedParams(
        qkv_format="thd" if thd else "sbhd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=packed.max_seqlen,
        max_seqlen_kv=packed.max_seqlen,
        plan=attention_plan(cu_seqlens) if cu_seqlens.device.type == "cpu" else None,
    )
