"""Qwen3.5 and Qwen3.6, dense and with experts, as a text model or as the text part of a model for images.

What sees images is carried: not trained, and written unchanged into exports; so are the layers for multi-token prediction.
"""

from __future__ import annotations

from dataclasses import replace

from vime.backends.megatron_utils.convert.decoder import decoder_ops
from vime.backends.megatron_utils.convert.family import Family
from vime.backends.megatron_utils.convert.fields import Fields
from vime.backends.megatron_utils.convert.shape import ModelShape, hybrid_shape, qwen_prediction, softmax_experts

__all__ = ["FAMILIES"]


def _text(fields: Fields) -> ModelShape:
    shape = replace(hybrid_shape(fields), carried=("mtp.",), prediction=qwen_prediction(int(fields.get("mtp_num_hidden_layers", 1))))
    fields.only("attn_output_gate", True)
    fields.ignore("mamba_ssm_dtype", "mtp_use_dedicated_embeddings")
    if "num_experts" in fields:
        # their experts in that layer are stored as one tensor, which is only carried
        shape = replace(shape, prediction=None, experts=softmax_experts(fields, shared=True, normalised=True))
    return shape


def _inner_text(fields: Fields) -> ModelShape:
    text = fields.inner("text_config")
    shape = _text(text)
    text.check_all_read()
    fields.ignore("vision_config")
    tied = bool(fields.get("tie_word_embeddings", shape.tied))
    return replace(shape, tied=tied, prefix="model.language_model.", carried=("mtp.", "model.visual."))


FAMILIES = (
    Family(architecture="Qwen3_5ForCausalLM", shape=_text, ops=decoder_ops),
    Family(architecture="Qwen3_5MoeForCausalLM", shape=_text, ops=decoder_ops),
    Family(architecture="Qwen3_5ForConditionalGeneration", shape=_inner_text, ops=decoder_ops),
    Family(architecture="Qwen3_5MoeForConditionalGeneration", shape=_inner_text, ops=decoder_ops),
)
