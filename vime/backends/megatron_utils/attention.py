"""Core attention over packed sequences, for machines without Transformer Engine.

On CUDA one call of `torch.nn.attention.varlen.varlen_attn` (flash attention). On the CPU, where that kernel does not
exist, rectangles of similar rows (`packed_params.AttentionPlan`): through SDPA, measured at 4096 tokens in 16 sequences,
208 ms against 383 ms for one SDPA a sequence and 1530 ms for a block-diagonal mask; and, where rows are short, by products
over all of them at once, since SDPA's blocked kernel is made for long ones.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import varlen

from vime.backends.megatron_utils.context_shard import ContextShard
from vime.backends.megatron_utils.fused import rotate
from vime.backends.megatron_utils.packed_params import AttentionPlan, PackedParams, Rectangle
from vime.errors import ConfigError

VARLEN_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters  # later releases want to be told
SHORT = 64  # tokens of a row up to which the scores are written out

__all__ = ["PackedCoreAttention", "packed_attention_cpu", "packed_attention_cuda", "shard_attention"]


class _ToSlots(torch.autograd.Function):
    """x [T, ...] -> [S, ...] by `slot_to_token`; padding slots give no gradient, a shared token gets the sum of its slots'."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.slot_to_token)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        plan: AttentionPlan = ctx.plan
        if plan.shared_slots is None:
            return grad.index_select(0, plan.token_to_slot), None
        rows = grad.reshape(len(grad), -1)
        return F.embedding_bag(plan.shared_slots, rows, plan.shared_starts, mode="sum").unflatten(1, grad.shape[1:]), None


class _ToTokens(torch.autograd.Function):
    """x [S, ...] -> [T, ...]: each token's output. Slots that give none, padding among them, get the gradient 0."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.token_to_slot)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])]).index_select(0, ctx.plan.slot_gives), None


class _ShortAttention(torch.autograd.Function):
    """softmax(q k^T scale + bias) v, written out: for short rows several times faster than SDPA's blocked kernel.

    q [b G, r m, D] holds the r query heads of a group after one another; k and v [b G, m, D]; bias [b or 1, 1, m, m]; `rows` is b.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, rows: int, scale: float) -> torch.Tensor:
        scores = torch.bmm(q, k.transpose(1, 2))
        scores.view(rows, -1, *bias.shape[-2:]).mul_(scale).add_(bias)
        weights = scores.softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        ctx.scale = scale
        return torch.bmm(weights, v)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None, None]:
        q, k, v, weights = ctx.saved_tensors
        grad_weights = torch.bmm(grad, v.transpose(1, 2))
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype).mul_(ctx.scale)
        return (
            torch.bmm(grad_scores, k),
            torch.bmm(grad_scores.transpose(1, 2), q),
            torch.bmm(weights.transpose(1, 2), grad),
            None,
            None,
            None,
        )


def _short_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Rectangle, scale: float) -> torch.Tensor:
    """`_ShortAttention` of one rectangle. q [b m, H, D], k [b m, G, D], v [b m, G, V] -> [b m, H, V]."""
    b, m = shape.rows, shape.longest
    groups, width = k.shape[1:]
    queries = q.view(b, m, groups, -1, width).permute(0, 2, 3, 1, 4).reshape(b * groups, -1, width)
    keys, values = (x.view(b, m, groups, -1).transpose(1, 2).reshape(b * groups, m, -1) for x in (k, v))
    out = _ShortAttention.apply(queries, keys, values, shape.bias(q.dtype), b, scale)
    return out.view(b, groups, -1, m, v.shape[-1]).permute(0, 3, 1, 2, 4).reshape(b * m, -1, v.shape[-1])


def packed_attention_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan, *, scale: float, dropout: float = 0.0
) -> torch.Tensor:
    """Causal attention within each sequence. query [T, H, D], key and value [T, G, D] (H a multiple of G) -> [T, H, D]."""
    slots = [_ToSlots.apply(x, plan) for x in (query, key, value)]
    outputs, start = [], 0
    for shape in plan.shapes:
        stop = start + shape.rows * shape.longest
        q, k, v = (x[start:stop] for x in slots)
        start = stop
        if shape.longest <= SHORT and not dropout:
            outputs.append(_short_attention(q, k, v, shape, scale))
            continue
        q, k, v = (x.unflatten(0, (shape.rows, shape.longest)).transpose(1, 2) for x in (q, k, v))
        mask = None if shape.mask is None else shape.mask[:, None]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, dropout_p=dropout, enable_gqa=query.shape[1] != key.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return _ToTokens.apply(torch.cat(outputs) if len(outputs) > 1 else outputs[0], plan)


def packed_attention_cuda(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *, scale: float
) -> torch.Tensor:
    """The same on CUDA (bfloat16 or float16), without a host synchronisation."""
    return _varlen(query, key, value, (cu_seqlens, cu_seqlens), (max_seqlen, max_seqlen), scale)


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: tuple[torch.Tensor, ...], longest: tuple[int, ...], scale: float
) -> torch.Tensor:
    """Causal attention of rows of queries to rows of keys, whose ends are the same position."""
    if query.shape[1] != key.shape[1] and not _takes_groups(query.device):
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    return _flash(query, key, value, starts, longest, scale)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: tuple[torch.Tensor, ...], longest: tuple[int, ...], scale: float
) -> torch.Tensor:
    options = {"enable_gqa": query.shape[1] != key.shape[1]} if VARLEN_GROUPS else {}
    return varlen.varlen_attn(query, key, value, *starts, *longest, scale=scale, window_size=(-1, 0), **options)


@functools.cache
def _takes_groups(device: torch.device) -> bool:
    """torch's kernel takes several query heads to a key, forward and backward: asked by a small example, for no release says so."""
    q, k, v = (torch.randn(8, heads, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
    starts = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    try:
        with torch.enable_grad():
            whole = _flash(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1), (starts, starts), (5, 5), 0.125)
            outs = [whole, _flash(q, k, v, (starts, starts), (5, 5), 0.125)]
            grads = [torch.autograd.grad(out.float().square().sum(), (q, k, v)) for out in outs]
    except (RuntimeError, ValueError):
        return False
    pairs = zip([outs[0], *grads[0]], [outs[1], *grads[1]], strict=True)
    return all(a.shape == b.shape and float((a - b).float().norm()) < 0.02 * float(a.float().norm()) for a, b in pairs)


def shard_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shard: ContextShard, *, scale: float, dropout: float = 0.0
) -> torch.Tensor:
    """Causal attention of a context-parallel rank's chunks. query [C, H, D], key and value [size x C, G, D] of all ranks -> [C, H, D]."""
    key, value = (x.index_select(0, shard.keys) for x in (key, value))
    if query.device.type != "cpu":
        longest = (max(shard.query_sizes), max(shard.key_sizes))
        return _varlen(query, key, value, (shard.cu_queries, shard.cu_keys), longest, scale)
    out = []
    gqa = query.shape[1] != key.shape[1]
    for q, k, v in zip(query.split(shard.query_sizes), key.split(shard.key_sizes), value.split(shard.key_sizes), strict=True):
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        row = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, dropout_p=dropout, enable_gqa=gqa)
        out.append(row[0].transpose(0, 1))
    return torch.cat(out)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] with its first dimensions rotated, as many as `cos` has."""
    size = cos.shape[-1]
    return rotate(x, cos, sin) if size == x.shape[-1] else torch.cat([rotate(x[..., :size], cos, sin), x[..., size:]], dim=-1)


class PackedCoreAttention(MegatronModule):
    """Megatron's core attention slot: causal self-attention over one packed row."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self" or attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise NotImplementedError(f"PackedCoreAttention does causal self-attention, not {attention_type} with {attn_mask_type}.")
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.cp_group = pg_collection.cp if pg_collection is not None else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedParams | None = None,
    ) -> torch.Tensor:
        """query [T, 1, H, D], key [T, 1, G, D] and value [T, 1, G, V], or all without the second dimension -> [T, 1, H x V]."""
        if packed_seq_params is None or attention_mask is not None or attention_bias is not None:
            raise NotImplementedError("PackedCoreAttention needs packed_seq_params, and takes neither a mask nor a bias.")
        q, k, v = (x.squeeze(1) if x.ndim == 4 else x for x in (query, key, value))
        if packed_seq_params.rotary is not None:
            q, k = (_rotated(x, *packed_seq_params.rotary).to(v.dtype) for x in (q, k))
        dropout = self.dropout if self.training else 0.0
        if dropout and q.device.type != "cpu":
            raise ConfigError("varlen_attn has no dropout: set --attention-dropout 0 or install Transformer Engine.")
        with get_cuda_rng_tracker().fork() if dropout else contextlib.nullcontext():
            out = self._attend(q, k, v, packed_seq_params, dropout)
        return out.reshape(out.shape[0], 1, -1)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: PackedParams, dropout: float) -> torch.Tensor:
        if params.shard is not None:
            k, v = (gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group) for x in (k, v))
            return shard_attention(q, k, v, params.shard, scale=self.scale, dropout=dropout)
        if params.plan is None:
            return packed_attention_cuda(q, k, v, params.cu_seqlens_q, params.max_seqlen_q, scale=self.scale)
        return packed_attention_cpu(q, k, v, params.plan, scale=self.scale, dropout=dropout)
