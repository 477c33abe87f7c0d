"""Qwen2 and Qwen2.5: biases on q, k, v."""

from __future__ import annotations

from vime.backends.megatron_utils.convert.decoder import decoder_ops
from vime.backends.megatron_utils.convert.family import Family
from vime.backends.megatron_utils.convert.fields import Fields
from vime.backends.megatron_utils.convert.shape import ModelShape, common_shape

__all__ = ["FAMILY"]


def _shape(fields: Fields) -> ModelShape:
    return common_shape(fields, qk_norm=False, qkv_bias=True)


FAMILY = Family(architecture="Qwen2ForCausalLM", shape=_shape, ops=decoder_ops)
