"""Megatron's GPTModel over packed batches, built from resolved Megatron arguments."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args

from vime.backends.megatron_utils.layer_probe import has_transformer_engine
from vime.backends.megatron_utils.layer_spec import layer_spec
from vime.backends.megatron_utils.packed_params import packed_params
from vime.packing.pack import PackedBatch

__all__ = ["PackedGPTModel", "build_model", "forward_logits", "transformer_config"]

ROTARY = 1  # where the rotary frequencies stand in what GPTModel._preprocess returns


class PackedGPTModel(GPTModel):
    """GPTModel that takes rotary positions from `position_ids` when the pack travels as one row.

    Megatron's own packed path ("thd", without Transformer Engine) rotates sequence by sequence in a Python loop, and it
    reads positions as absolute over the pack when max_seqlen happens to equal the pack's length (rope_utils.py, "CASE 1").
    Frequencies gathered by position need neither.
    """

    def _preprocess(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, decoder_input: Any = None, inference_context: Any = None,
        packed_seq_params: Any = None, padding_mask: Any = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        out = super()._preprocess(input_ids, position_ids, decoder_input, inference_context, packed_seq_params, padding_mask)
        if packed_seq_params is None or packed_seq_params.qkv_format != "sbhd":
            return out
        return (*out[:ROTARY], out[ROTARY].index_select(0, position_ids.flatten()), *out[ROTARY + 1 :])


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    """Megatron's own path from arguments to the model's configuration.

    Gradients are summed over micro-batches and data-parallel ranks (`calculate_per_token_loss` takes out the averaging):
    the loss carries each token's weight in the step's mean already.
    """
    config = core_transformer_config_from_args(args)
    config.calculate_per_token_loss = True
    config.variable_seq_lengths = True
    return config


def build_model(args: argparse.Namespace, config: TransformerConfig) -> PackedGPTModel:
    """The whole model of this rank (its tensor-parallel shard), on the current device, in `config.params_dtype`."""
    model = PackedGPTModel(
        config,
        layer_spec(config),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
    )
    return model.to(torch.cuda.current_device()) if torch.cuda.is_available() else model


def forward_logits(model: torch.nn.Module, packed: PackedBatch) -> torch.Tensor:
    """Logits [T, padded vocabulary / tensor parallel] of a packed batch; collective over the tensor-parallel group."""
    logits = model(
        packed.tokens[None],
        packed.position_ids[None],
        None,
        packed_seq_params=packed_params(packed, thd=has_transformer_engine()),
    )
    return logits[0]
