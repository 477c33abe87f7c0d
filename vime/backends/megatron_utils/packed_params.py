"""The shape of one packed micro-batch, as Megatron's layers get it, and how the CPU attention walks through it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from vime.backends.megatron_utils.context_shard import ContextShard
from vime.packing.computed import ComputedRow
from vime.packing.pack import PackedBatch

__all__ = ["AttentionPlan", "PackedParams", "Rectangle", "attention_plan", "computed_params", "packed_params", "shard_params"]

PADDING_ALLOWED = 1.25  # padded rows per real row within one group of rows
LONGEST_TREE = 512  # tokens: a tree has a mask of their square


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """b rows of m slots: sequences, in which attention is causal, or trees, in which `mask` says who sees whom."""

    rows: int  # b
    longest: int  # m
    mask: torch.Tensor | None = None  # [b, m, m] bool, True where the query (second dimension) sees the key

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """[b or 1, 1, m, m]: 0 where the query sees the key, -inf elsewhere."""
        seen = torch.ones(1, self.longest, self.longest, dtype=torch.bool).tril() if self.mask is None else self.mask
        return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Rows of similar length, laid out as a few rectangles so that one call serves many of them.

    The rectangles follow one another in one flat row of S slots. T = tokens that are computed. Sequences that share a prompt
    are one row, a tree, where that means fewer pairs of tokens; else a shared token stands in a slot of each of them, and the
    first of these gives its output.
    """

    shapes: tuple[Rectangle, ...]
    slot_to_token: torch.Tensor  # [S] i64; padding slots hold any token: no other slot sees them
    token_to_slot: torch.Tensor  # [T] i64, the slot that gives the token's output
    slot_gives: torch.Tensor  # [S] i64, the token to which the slot gives its output; T for nobody's
    shared_slots: torch.Tensor | None = None  # [slots without padding] i64, token after token; None when each token has one slot
    shared_starts: torch.Tensor | None = None  # [T] i64, where in `shared_slots` each token's slots begin


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's parameters of a packed batch, plus the plan for the CPU kernel.

    With Transformer Engine `qkv_format` is "thd". Without it the pack travels as one row of T tokens ("sbhd", b = 1):
    positions then come from `position_ids` (see `model.PackedGPTModel`) and only the core attention sees the borders.
    """

    plan: AttentionPlan | None = None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None  # cosines [T, 1, D] and sines [T, 1, D / 2]
    positions: torch.Tensor | None = None  # [T] i64, where attention computes its own rotary frequencies (`latent.LatentAttention`)
    rows: torch.Tensor | None = None  # [N] i64: the only ones that the last layer hands on (`layer_spec.LastLayer`); None = all
    predicts: PackedBatch | None = None  # what the layers for multi-token prediction learn from (`prediction`); None = they do not run
    shard: ContextShard | None = None  # with context parallelism: what this rank has of the pack


def attention_plan(cu_seqlens: torch.Tensor, source: torch.Tensor | None = None) -> AttentionPlan:
    """Group the sequences of `cu_seqlens` [n + 1] by length, so that padding stays below a quarter of each group.

    `source` [E = cu_seqlens[-1]] i64 says which computed token each token of the sequences is, when prompts are shared: every
    number from 0 to its maximum occurs, and sequences that begin with the same one share their prompts. None = nothing is.
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    total = int(cu_seqlens[-1])
    if source is None:
        shapes, slot_to_token = _rectangles(lengths, torch.arange(total))
        return _plan(shapes, slot_to_token, total)
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    count = int(source.max()) + 1
    first = source[cu_seqlens[:-1].long()]  # [n] names the tree of each sequence
    tree_of = torch.empty(count, dtype=torch.int64)
    tree_of[source] = first[sequence]
    size = torch.bincount(tree_of, minlength=count)
    pairs = torch.zeros(count, dtype=torch.int64).index_add(0, first, lengths.square())
    grows = (torch.bincount(first, minlength=count) > 1) & (size.square() <= pairs) & (size <= LONGEST_TREE)
    shapes, slot_to_token = _rectangles(lengths[~grows[first]], source[~grows[first[sequence]]])
    tokens = torch.argsort(tree_of, stable=True)
    tokens = tokens[grows[tree_of[tokens]]]
    if len(tokens):
        trees, slots = _rectangles(size[grows], tokens)
        shapes += _with_masks(trees, slots, sequence, source, torch.bincount(source, minlength=count) > 1)
        slot_to_token = torch.cat([slot_to_token, slots])
    return _plan(shapes, slot_to_token, count)


def _rectangles(lengths: torch.Tensor, tokens: torch.Tensor) -> tuple[tuple[Rectangle, ...], torch.Tensor]:
    """Rows of `lengths` [n], whose `tokens` follow one another, as rectangles; the token in each slot, -1 in padding."""
    order = torch.argsort(lengths, descending=True, stable=True)
    sorted_lengths, starts = lengths[order].tolist(), lengths.cumsum(0) - lengths
    shapes, slots = [], [torch.empty(0, dtype=torch.int64)]
    begin = 0
    while begin < len(sorted_lengths):
        longest, real, end = sorted_lengths[begin], 0, begin
        while end < len(sorted_lengths) and longest * (end - begin + 1) <= PADDING_ALLOWED * (real + sorted_lengths[end]):
            real += sorted_lengths[end]
            end += 1
        rows = order[begin:end]
        offsets = torch.arange(longest)
        inside = offsets[None, :] < lengths[rows][:, None]
        place = (starts[rows][:, None] + offsets[None, :]).where(inside, 0)
        slots.append(tokens[place].where(inside, -1).flatten())
        shapes.append(Rectangle(rows=end - begin, longest=longest))
        begin = end
    return tuple(shapes), torch.cat(slots)


def _with_masks(
    trees: tuple[Rectangle, ...], slots: torch.Tensor, sequence: torch.Tensor, source: torch.Tensor, shared: torch.Tensor
) -> tuple[Rectangle, ...]:
    """A token sees what is shared or of its own sequence, up to its own place; padding sees padding.

    Tokens stand in a tree in the order of the pack, in which what a token sees precedes it.
    """
    branch = torch.empty(len(shared), dtype=torch.int64)
    branch[source] = sequence
    branch = torch.cat([branch.where(~shared, -1), torch.tensor([-2])])[slots]  # slot -1, padding, takes the last
    out, begin = [], 0
    for tree in trees:
        own = branch[begin : begin + tree.rows * tree.longest].view(tree.rows, 1, tree.longest)
        seen = (own == own.transpose(1, 2)) | (own == -1)
        out.append(Rectangle(rows=tree.rows, longest=tree.longest, mask=seen.tril()))
        begin += tree.rows * tree.longest
    return tuple(out)


def _plan(shapes: tuple[Rectangle, ...], slots: torch.Tensor, count: int) -> AttentionPlan:
    """The maps between `slots` [S], -1 in padding, and `count` tokens."""
    filled = (slots >= 0).nonzero().squeeze(-1)
    by_token = filled[torch.argsort(slots[filled], stable=True)]
    counts = torch.bincount(slots[filled], minlength=count)
    starts = counts.cumsum(0) - counts
    token_to_slot = by_token[starts]
    slot_gives = torch.full((len(slots),), count, dtype=torch.int64)
    slot_gives[token_to_slot] = torch.arange(count)
    shared = len(by_token) > count
    return AttentionPlan(
        shapes=shapes,
        slot_to_token=slots.clamp(min=0),
        token_to_slot=token_to_slot,
        slot_gives=slot_gives,
        shared_slots=by_token if shared else None,
        shared_starts=starts if shared else None,
    )


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


def shard_params(shard: ContextShard, *, thd: bool) -> PackedParams:
    """Megatron's view of a context-parallel rank's share. `thd`: for Transformer Engine's layers, which gather keys themselves."""
    return PackedParams(
        qkv_format="thd" if thd else "sbhd",
        cu_seqlens_q=shard.cu_padded,
        cu_seqlens_kv=shard.cu_padded,
        max_seqlen_q=shard.longest,
        max_seqlen_kv=shard.longest,
        shard=shard,
    )
