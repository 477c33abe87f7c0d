"""Training the layers for multi-token prediction beside the model (--enable-mtp-training; arXiv:2412.19437, section 2.2).

    state of position t, embedding of token t + 1 ──▶ layer 1 ──▶ its state ──▶ output layer ──▶ token t + 2
    state of layer 1,    embedding of token t + 2 ──▶ layer 2 ──▶ ...                       ──▶ token t + 3

The layers learn from the model and do not change it: states, embeddings and output layer come in without gradient, and their gradients
have a norm of their own, which is clipped by itself. So the model is trained bit for bit as without them.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from vime.backends.megatron_utils.layer_probe import has_transformer_engine
from vime.backends.megatron_utils.layer_spec import attention_layer
from vime.backends.megatron_utils.log_probs import token_log_probs
from vime.backends.megatron_utils.norm import RMSNorm
from vime.packing.pack import PackedBatch

__all__ = ["prediction_block", "prediction_loss"]


def prediction_block(config: TransformerConfig, layers: int) -> MultiTokenPredictionBlock:
    """Megatron's block of `layers` layers for a model of this `config`; all of it is on this pipeline stage, which is the only one."""
    own = copy(config)  # the model's says nothing of it: Megatron would take the loss in its own way
    own.mtp_num_layers = layers
    own.mtp_detach_heads = True  # which marks the parameters for a gradient norm of their own
    own.moe_router_load_balancing_type, own.moe_aux_loss_coeff, own.moe_z_loss_coeff = "none", 0.0, None  # these are of the model's layers
    if has_transformer_engine():
        spec = get_gpt_mtp_block_spec(own, attention_layer(config), use_transformer_engine=True)
    else:
        layer = MultiTokenPredictionLayerSubmodules(
            enorm=RMSNorm, hnorm=RMSNorm, eh_proj=ColumnParallelLinear, mtp_model_layer=attention_layer(config), layer_norm=RMSNorm
        )
        spec = MultiTokenPredictionBlockSubmodules(layer_specs=[ModuleSpec(module=MultiTokenPredictionLayer, submodules=layer)] * layers)
    return MultiTokenPredictionBlock(config=own, spec=spec, pg_collection=ProcessGroupCollection.use_mpu_process_groups())


def prediction_loss(
    block: MultiTokenPredictionBlock,
    hidden: torch.Tensor,
    packed: PackedBatch,
    *,
    embedding: Any,
    output_layer: Any,
    output_weight: torch.Tensor,
    tp_group: dist.ProcessGroup,
    vocab_size: int | None = None,
    **of_layer: Any,
) -> torch.Tensor:
    """The layers' mean cross-entropy, nats, a scalar f32 that is differentiable in the block's parameters alone.

    `hidden` [T / sequence parallel, 1, H] is the state before the model's output layer, after its last norm. A prediction weighs what
    its token weighs in the step's mean (`PackedBatch.loss_weight`), so untrained tokens, and those that would be of the next sequence,
    weigh nothing; the sum over micro-batches and data-parallel ranks is the step's mean. `of_layer` goes to the decoder layers.
    """
    tokens, labels, weight = packed.tokens, packed.labels, packed.loss_weight
    hidden = hidden.detach()
    total = hidden.new_zeros((), dtype=torch.float32)
    for layer in block.layers:
        tokens, labels, weight = labels, _next(labels, packed), _next(weight, packed)
        embedded = embedding(input_ids=tokens[None], position_ids=packed.position_ids[None]).detach()
        hidden = layer._proj_and_transformer_layer(hidden_states=hidden, decoder_input=embedded, attention_mask=None, **of_layer)
        rows = weight.nonzero().squeeze(-1)
        if not len(rows):  # one that weighs nothing, so that every parameter has a gradient
            rows = torch.zeros(1, dtype=torch.int64, device=weight.device)
        states = hidden
        if block.config.sequence_parallel:
            states = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        logits, _ = output_layer(states.index_select(0, rows), weight=output_weight.detach())
        log_probs, _ = token_log_probs(logits.squeeze(1), labels[rows], tp_group=tp_group, vocab_size=vocab_size)
        total = total - (weight[rows] * log_probs).sum()
    return total / len(block.layers)


def _next(values: torch.Tensor, packed: PackedBatch) -> torch.Tensor:
    """[T]: each position's value is that of the next one of its sequence, 0 at the last."""
    shifted = torch.cat([values[1:], values.new_zeros(1)])
    return shifted.masked_fill(torch.cat([packed.position_ids[1:] == 0, torch.ones_like(packed.position_ids[:1], dtype=torch.bool)]), 0)
