"""Which modules Megatron builds its layers from: Transformer Engine's where it is installed, else Megatron's own with our
norm and our core attention put in."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset

from vime.backends.megatron_utils.attention import PackedCoreAttention
from vime.backends.megatron_utils.delta import DeltaNet, HeadNorm
from vime.backends.megatron_utils.experts import Router
from vime.backends.megatron_utils.fused import swiglu
from vime.backends.megatron_utils.latent import LatentAttention
from vime.backends.megatron_utils.layer_probe import has_transformer_engine
from vime.backends.megatron_utils.linear import ColumnLinear, RowLinear
from vime.backends.megatron_utils.norm import RMSNorm

__all__ = ["GatedMLP", "LastLayer", "attention_layer", "layer_spec"]


class GatedMLP(MLP):
    """Megatron's MLP with SwiGLU in fewer passes over memory."""

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **unused: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, 1, H] -> ([T, 1, H], None)."""
        if per_token_scale is not None or self.config.activation_func_clamp_value is not None:
            return super().forward(hidden_states, per_token_scale, **unused)
        inner, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(inner))


class LastLayer(TransformerLayer):
    """Megatron's layer that, where `PackedParams.rows` says so, computes behind its attention only the rows that are wanted."""

    def _forward_mlp(
        self, hidden_states: torch.Tensor, inference_context: Any = None, padding_mask: Any = None, packed_seq_params: Any = None
    ) -> Any:
        if packed_seq_params is not None and packed_seq_params.rows is not None:
            hidden_states = hidden_states.index_select(0, packed_seq_params.rows)
        return super()._forward_mlp(hidden_states, inference_context, padding_mask=padding_mask, packed_seq_params=packed_seq_params)


def layer_spec(config: TransformerConfig, *, stage: int | None = None, last: bool = True) -> TransformerBlockSubmodules:
    """The submodules of this pipeline rank's decoder layers, of chunk `stage` where there are several. `last`: the output layer follows."""
    engine = has_transformer_engine()
    spec = _attention_layers(config, stage)
    layers = list(spec.layer_specs)
    if config.experimental_attention_variant is not None:
        offset = get_transformer_layer_offset(config, vp_stage=stage)
        layers = [_linear(layer) if config.linear_attention_freq[offset + i] else layer for i, layer in enumerate(layers)]
    if engine:
        return replace(spec, layer_specs=layers)
    if last:
        layers[-1] = replace(layers[-1], module=LastLayer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def attention_layer(config: TransformerConfig) -> ModuleSpec:
    """A decoder layer as the model's last, with attention over all positions whatever that has."""
    return _attention_layers(config, None).layer_specs[-1]


def _attention_layers(config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    engine = has_transformer_engine()
    plain = copy(config)  # Megatron's own spec of linear attention needs Transformer Engine, and layers of it are put in below
    plain.experimental_attention_variant = None
    spec = get_gpt_decoder_block_spec(plain, use_transformer_engine=engine, normalization=config.normalization, vp_stage=stage)
    for layer in spec.layer_specs:
        mlp = layer.submodules.mlp
        if mlp.func is MoELayer:
            layer.submodules.mlp = partial(MoELayer, submodules=replace(mlp.keywords["submodules"], router=Router))
        elif not engine and config.gated_linear_unit and config.activation_func is torch.nn.functional.silu and not config.add_bias_linear:
            inner = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
            layer.submodules.mlp = partial(GatedMLP.as_mlp_submodule, submodules=inner)
        if not engine:
            _put_ours(layer.submodules, config)
    return spec


def _linear(layer: ModuleSpec) -> ModuleSpec:
    """The layer with a gated delta net in place of attention; its norm stands by itself, whatever the other layers do."""
    inner = GatedDeltaNetSubmodules(in_proj=ColumnLinear, out_norm=HeadNorm, out_proj=RowLinear)
    keys = {**layer.submodules.sharded_state_dict_keys_map, "input_layernorm.": "self_attention.in_proj.layer_norm_"}
    attention = ModuleSpec(module=DeltaNet, submodules=inner)
    submodules = replace(layer.submodules, input_layernorm=RMSNorm, self_attention=attention, sharded_state_dict_keys_map=keys)
    return replace(layer, submodules=submodules)


def _put_ours(submodules: Any, config: TransformerConfig) -> None:
    submodules.input_layernorm = RMSNorm
    submodules.pre_mlp_layernorm = RMSNorm
    attention = submodules.self_attention.submodules
    attention.core_attention, attention.linear_proj = PackedCoreAttention, RowLinear
    if config.multi_latent_attention:
        submodules.self_attention.module = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
        return
    attention.linear_qkv = ColumnLinear
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
