"""Megatron's GPTModel over packed batches, built from resolved Megatron arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.global_vars import set_args

from vime.backends.megatron_utils.context_shard import context_shard
from vime.backends.megatron_utils.layer_probe import has_transformer_engine
from vime.backends.megatron_utils.layer_spec import layer_spec
from vime.backends.megatron_utils.packed_params import PackedParams, computed_params, packed_params, shard_params
from vime.backends.megatron_utils.prediction import prediction_block, prediction_loss
from vime.errors import HookError
from vime.hooks import hook_errors
from vime.packing.computed import computed_row
from vime.packing.pack import PackedBatch

__all__ = ["PackedGPTModel", "build_model", "forward_logits", "gpt_model", "is_last", "transformer_config"]

Provider = Callable[..., Any]  # (pre_process, post_process, vp_stage=None) -> a chunk of the model


class PackedGPTModel(GPTModel):
    """GPTModel that takes rotary positions from `position_ids` when the pack travels as one row.

    Megatron's own packed path ("thd", without Transformer Engine) rotates sequence by sequence in a Python loop, and it
    reads positions as absolute over the pack when max_seqlen happens to equal the pack's length (rope_utils.py, "CASE 1").
    Frequencies gathered by position need neither.
    """

    # `mtp`: the layers for multi-token prediction, where they are trained; Megatron looks whether there is such an attribute
    words: int | None = None  # the vocabulary without padding
    predicted: torch.Tensor | None = None  # their loss on the micro-batch that was computed last

    def _postprocess(
        self, hidden_states: torch.Tensor, *args: Any, packed_seq_params: Any = None, rotary_pos_emb: Any = None, padding_mask: Any = None,
        **named: Any,
    ) -> Any:  # fmt: skip
        if (packed := getattr(packed_seq_params, "predicts", None)) is not None:
            tied = self.share_embeddings_and_output_weights
            self.predicted = prediction_loss(
                self.mtp, hidden_states, packed, embedding=self.embedding, output_layer=self.output_layer,
                output_weight=self.shared_embedding_or_output_weight() if tied else self.output_layer.weight, tp_group=self.tp_group,
                vocab_size=self.words, packed_seq_params=packed_seq_params, rotary_pos_emb=rotary_pos_emb, padding_mask=padding_mask,
            )  # fmt: skip
        shape = {"packed_seq_params": packed_seq_params, "rotary_pos_emb": rotary_pos_emb, "padding_mask": padding_mask}
        return super()._postprocess(hidden_states, *args, **shape, **named)

    def _preprocess(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, decoder_input: Any = None, inference_context: Any = None,
        packed_seq_params: Any = None, padding_mask: Any = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        out = super()._preprocess(input_ids, position_ids, decoder_input, inference_context, packed_seq_params, padding_mask)
        embedded, *rest, padding_mask = out
        if padding_mask is not None and self.config.sequence_parallel and not self.pre_process:  # Megatron does it in the first stage only
            padding_mask = scatter_to_sequence_parallel_region(padding_mask.t().contiguous()).t().contiguous()
        if embedded is not None and torch.is_grad_enabled() and self.config.recompute_granularity == "full":
            embedded.requires_grad_()  # recomputed layers learn nothing behind an embedding that is frozen
        if packed_seq_params is None or packed_seq_params.qkv_format != "sbhd":
            return embedded, *rest, padding_mask
        if rest[0] is None:
            packed_seq_params.positions = position_ids.flatten()
            return embedded, *rest, padding_mask
        if self.config.context_parallel_size > 1:  # all positions, not those that Megatron would cut out for this rank
            rest[0] = self.rotary_pos_emb(packed_seq_params.max_seqlen_q, packed_seq=True)
        frequencies = rest[0].index_select(0, position_ids.flatten())
        angles = frequencies.squeeze(1)  # the core attention rotates (`attention.PackedCoreAttention`)
        packed_seq_params.rotary = (angles.cos(), angles[..., : angles.shape[-1] // 2].sin())
        return embedded, None, *rest[1:], padding_mask


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    """Megatron's own path from arguments to the model's configuration; for the same `args` the same object.

    Gradients are summed over micro-batches and data-parallel ranks (`calculate_per_token_loss` takes out the averaging):
    the loss carries each token's weight in the step's mean already.
    """
    if "transformer_config" not in vars(args):
        config = core_transformer_config_from_args(args)
        config.calculate_per_token_loss = True
        config.variable_seq_lengths = True
        args.transformer_config = config
    found: TransformerConfig = args.transformer_config
    return found


def build_model(args: argparse.Namespace, provider: Provider | None = None, path: str = "") -> list[PackedGPTModel]:
    """This rank's share of the model, on the current device, in `config.params_dtype`: its chunks, in the order in which they are computed.

    One, or several with an interleaved pipeline (--num-layers-per-virtual-pipeline-stage). `provider` is the user's function at `path`
    that builds a chunk instead of `gpt_model`. Raises HookError when it fails, or when this trainer cannot use what it made.
    """
    build = partial(gpt_model, args) if provider is None else _provided(args, provider, path)
    count = transformer_config(args).virtual_pipeline_model_parallel_size
    chunks = []
    for stage in [None] if count is None else range(count):
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        model = build(pre_process=first, post_process=last, vp_stage=stage)
        if last:
            model.output_layer.sequence_parallel = False  # `_logits_at` gathers the sequence, chooses rows, and then calls it
        chunks.append(model.to(torch.cuda.current_device()) if torch.cuda.is_available() else model)
    return chunks


def gpt_model(
    args: argparse.Namespace, *, pre_process: bool, post_process: bool, vp_stage: int | None = None, layers: Any = None
) -> PackedGPTModel:
    """One chunk of the model: with the embedding (`pre_process`), with the output layer (`post_process`), of `layers` or ours.

    `layers` are TransformerBlockSubmodules, as `layer_spec` makes them. For functions of --custom-model-provider-path, too.
    """
    config = transformer_config(args)
    model = PackedGPTModel(
        config,
        layers or layer_spec(config, stage=vp_stage, last=post_process),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        vp_stage=vp_stage,
    )
    if args.prediction_layers:
        model.mtp, model.words = prediction_block(config, args.prediction_layers), args.vocab_size
    return model


def _provided(args: argparse.Namespace, provider: Provider, path: str) -> Provider:
    """--custom-model-provider-path: `provider`(pre_process, post_process, vp_stage) while Megatron's `get_args()` answers, checked."""

    def build(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
        flag = "--custom-model-provider-path"
        set_args(args)
        with hook_errors(flag, path, provider):
            model = provider(pre_process, post_process, vp_stage=vp_stage)
        if not isinstance(model, PackedGPTModel):
            raise HookError(
                f"{flag} {path} returned a {type(model).__name__}; expected a vime.backends.megatron_utils.model.PackedGPTModel, which "
                "takes packed sequences: derive yours from it, or build it with gpt_model(get_args(), ...)."
            )
        if model.config is not transformer_config(args):
            raise HookError(
                f"{flag} {path} built its model from a configuration of its own: take "
                "vime.backends.megatron_utils.model.transformer_config(get_args()), which the trainer reads, and change that."
            )
        return model

    return build


def forward_logits(
    model: torch.nn.Module, packed: PackedBatch, wanted: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(logits [N, padded vocabulary / tensor parallel], which places of `packed` they belong to, [N] i64 or None for all T).

    `wanted` [N >= 1] i64 says for which places; None = for all. Only for these does the output layer run; on the CPU nothing is
    computed of a dense model that they do not look at, and equal prompts are computed once (`packing.computed`). A context-parallel
    rank gives those of its own places, T standing for padding, and one that is not wanted where it has none. A pipeline stage that
    is not the last gives its hidden states. Collective over all ranks that share the micro-batch.
    """
    config: TransformerConfig = model.config  # type: ignore[assignment]
    thd = has_transformer_engine()
    if config.context_parallel_size > 1:
        rank, multiple = parallel_state.get_context_parallel_rank(), config.tensor_model_parallel_size if config.sequence_parallel else 1
        shard = context_shard(packed, rank=rank, size=config.context_parallel_size, multiple_of=multiple)
        rows = None if wanted is None else shard.rows(wanted)
        padding = (shard.at == packed.num_tokens) | packed.is_filler
        out = _run(model, shard.tokens, shard.position_ids, shard_params(shard, thd=thd), rows, padding)
        return out, shard.at if rows is None else shard.at[rows]
    dropped = (config.hidden_dropout, config.attention_dropout, getattr(config, "adapter_dropout", 0.0))
    drops = model.training and max(dropped) > 0  # samples share no dropped unit
    routes = config.num_moe_experts is not None  # the router's statistics are of all tokens
    routes |= config.experimental_attention_variant is not None  # and a linear attention's state runs through each sequence by itself
    predicts = model.training and torch.is_grad_enabled() and getattr(getattr(model, "module", model), "mtp", None) is not None
    if wanted is None or drops or routes or predicts or config.sequence_parallel or packed.tokens.device.type != "cpu":
        padding = (packed.sequence_ids < 0) | packed.is_filler
        params = packed_params(packed, thd=thd)
        params.predicts = packed if predicts else None
        return _run(model, packed.tokens, packed.position_ids, params, wanted, padding), wanted
    computed = computed_row(packed, wanted)
    out = _run(model, computed.tokens, computed.position_ids, computed_params(computed), None, None)
    return out[: len(wanted)] if is_last(model) else out, wanted


def is_last(model: torch.nn.Module) -> bool:
    """This chunk of the model gives logits."""
    return bool(getattr(model, "module", model).post_process)


def _run(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    params: PackedParams,
    rows: torch.Tensor | None,
    padding: torch.Tensor | None,
) -> torch.Tensor:
    config: TransformerConfig = model.config  # type: ignore[assignment]
    excluded = padding[None] if padding is not None and config.num_moe_experts is not None else None
    return model(
        tokens[None],
        positions[None],
        None,
        packed_seq_params=params,
        padding_mask=excluded,
        output_processor=_logits_at,
        output_processor_context=rows,
    )


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
