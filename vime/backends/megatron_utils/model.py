"""Megatron's GPTModel over packed batches, built from resolved Megatron arguments."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args

from vime.backends.megatron_utils.layer_probe import has_transformer_engine
from vime.backends.megatron_utils.layer_spec import layer_spec
from vime.backends.megatron_utils.packed_params import PackedParams, computed_params, packed_params
from vime.packing.computed import computed_row
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
        frequencies = out[ROTARY].index_select(0, position_ids.flatten())
        if packed_seq_params.plan is not None:  # on the CPU the core attention rotates (`attention.PackedCoreAttention`)
            angles = frequencies.squeeze(1)
            packed_seq_params.rotary = (angles.cos(), angles[..., : angles.shape[-1] // 2].sin())
            frequencies = None
        return (*out[:ROTARY], frequencies, *out[ROTARY + 1 :])


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
    model.output_layer.sequence_parallel = False  # `_logits_at` gathers the sequence, chooses rows, and then calls it
    return model.to(torch.cuda.current_device()) if torch.cuda.is_available() else model


def forward_logits(model: torch.nn.Module, packed: PackedBatch, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [N, padded vocabulary / tensor parallel] at the positions `rows` [N >= 1] i64 of `packed`; None = at all T.

    Only for these does the output layer run; on the CPU nothing is computed that they do not look at, and equal prompts are
    computed once (`packing.computed`). Collective over the tensor-parallel group.
    """
    config: TransformerConfig = model.config  # type: ignore[assignment]
    drops = model.training and (config.hidden_dropout > 0 or config.attention_dropout > 0)  # samples share no dropped unit
    if rows is None or drops or config.sequence_parallel or packed.tokens.device.type != "cpu":
        params = packed_params(packed, thd=has_transformer_engine())
        return _run(model, packed.tokens, packed.position_ids, params, rows)
    computed = computed_row(packed, rows)
    return _run(model, computed.tokens, computed.position_ids, computed_params(computed), None)[: len(rows)]


def _run(model: torch.nn.Module, tokens: torch.Tensor, positions: torch.Tensor, params: PackedParams, rows: torch.Tensor | None) -> Any:
    return model(tokens[None], positions[None], None, packed_seq_params=params, output_processor=_logits_at, output_processor_context=rows)


def _logits_at(
    *, hidden_states: torch.Tensor, output_layer: Any, output_weight: torch.Tensor | None, scale_logits: Any, context: torch.Tensor | None,
    config: TransformerConfig, **unused: Any,
) -> torch.Tensor:  # fmt: skip
    """The output layer on the rows `context` of the hidden states [T / sequence parallel, 1, H]; None = on all."""
    if config.sequence_parallel:  # the output layer gathers nothing (`build_model`); its input's gradient is whole on each rank
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
    if context is not None:
        hidden_states = hidden_states.index_select(0, context)
    logits, _ = output_layer(hidden_states, weight=output_weight)
    return scale_logits(logits).squeeze(1)
