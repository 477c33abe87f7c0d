"""Core attention over packed sequences, for machines without Transformer Engine.

On CUDA one call of `torch.nn.attention.varlen.varlen_attn` (flash attention). On the CPU, where that kernel does not
exist, SDPA over rectangles of similar sequences (`packed_params.AttentionPlan`): measured at 4096 tokens in 16 sequences,
208 ms against 383 ms for one SDPA a sequence and 1530 ms for a block-diagonal mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import varlen

from vime.backends.megatron_utils.packed_params import AttentionPlan, PackedParams

__all__ = ["PackedCoreAttention", "packed_attention_cpu", "packed_attention_cuda"]


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


def packed_attention_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan, *, scale: float, dropout: float = 0.0
) -> torch.Tensor:
    """Causal attention within each sequence. query [T, H, D], key and value [T, G, D] (H a multiple of G) -> [T, H, D]."""
    slots = [_ToSlots.apply(x, plan) for x in (query, key, value)]
    outputs, start = [], 0
    for rows, longest in plan.shapes:
        stop = start + rows * longest
        q, k, v = (x[start:stop].unflatten(0, (rows, longest)).transpose(1, 2) for x in slots)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, dropout_p=dropout, enable_gqa=query.shape[1] != key.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        start = stop
    return _ToTokens.apply(torch.cat(outputs) if len(outputs) > 1 else outputs[0], plan)


def packed_attention_cuda(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *, scale: float
) -> torch.Tensor:
    """The same on CUDA (bfloat16 or float16), without a host synchronisation."""
    if query.shape[1] != key.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    return varlen.varlen_attn(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale, window_size=(-1, 0))


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
        if config.context_parallel_size != 1:
            raise NotImplementedError("PackedCoreAttention does not split sequences over context-parallel ranks.")
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

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
        """query [T, 1, H, D], key and value [T, 1, G, D] -> [T, 1, H x D]."""
        if packed_seq_params is None or attention_mask is not None or attention_bias is not None:
            raise NotImplementedError("PackedCoreAttention needs packed_seq_params, and takes neither a mask nor a bias.")
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if packed_seq_params.plan is None:
            if self.dropout and self.training:
                raise NotImplementedError("varlen_attn has no dropout: set --attention-dropout 0 or install Transformer Engine.")
            out = packed_attention_cuda(q, k, v, packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q, scale=self.scale)
        elif self.dropout and self.training:
            with get_cuda_rng_tracker().fork():
                out = packed_attention_cpu(q, k, v, packed_seq_params.plan, scale=self.scale, dropout=self.dropout)
        else:
            out = packed_attention_cpu(q, k, v, packed_seq_params.plan, scale=self.scale)
        return out.reshape(out.shape[0], 1, -1)
