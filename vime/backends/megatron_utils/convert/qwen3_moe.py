"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the MLP, in all layers or in some."""

from __future__ import annotations

from dataclasses import replace

from vime.backends.megatron_utils.convert.decoder import decoder_ops
from vime.backends.megatron_utils.convert.family import Family
from vime.backends.megatron_utils.convert.fields import Fields
from vime.backends.megatron_utils.convert.shape import ModelShape, common_shape, softmax_experts

__all__ = ["FAMILY"]


def _shape(fields: Fields) -> ModelShape:
    shape = common_shape(fields, qk_norm=True, qkv_bias=False, needs_head_dim=True)
    return replace(shape, experts=softmax_experts(fields))


FAMILY = Family(architecture="Qwen3MoeForCausalLM", shape=_shape, ops=decoder_ops)
