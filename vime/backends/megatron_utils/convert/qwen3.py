"""Qwen3 (dense): RMSNorm on queries and keys, a head size of its own."""

from __future__ import annotations

from vime.backends.megatron_utils.convert.decoder import decoder_ops
from vime.backends.megatron_utils.convert.family import Family
from vime.backends.megatron_utils.convert.fields import Fields
from vime.backends.megatron_utils.convert.shape import ModelShape, common_shape

__all__ = ["FAMILY"]


def _shape(fields: Fields) -> ModelShape:
    return common_shape(fields, qk_norm=True, qkv_bias=False, needs_head_dim=True)


FAMILY = Family(architecture="Qwen3ForCausalLM", shape=_shape, ops=decoder_ops)
