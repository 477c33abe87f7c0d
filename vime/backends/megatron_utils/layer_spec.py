"""Which modules Megatron builds its layers from: Transformer Engine's where it is installed, else Megatron's own with our
norm and our core attention put in."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from vime.backends.megatron_utils.attention import PackedCoreAttention
from vime.backends.megatron_utils.fused import rms_norm, swiglu
from vime.backends.megatron_utils.latent import LatentAttention
from vime.backends.megatron_utils.layer_probe import has_transformer_engine
from vime.backends.megatron_utils.linear import ColumnLinear, RowLinear

__all__ = ["GatedMLP", "LastLayer", "RMSNorm", "Router", "layer_spec"]


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467, eq. 4). Megatron's own wrapper refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise NotImplementedError(
                "without Transformer Engine only plain RMSNorm is there: drop --apply-layernorm-1p and --normalization."
            )
        self.eps = eps
        device = torch.device("cpu") if config.use_cpu_initialization or not torch.cuda.is_available() else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # its gradient is summed over tensor parallel ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        if x.device.type == "cpu":
            return rms_norm(x, self.weight, self.eps)
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class GatedMLP(MLP):
    """Megatron's MLP with SwiGLU in fewer passes over memory, for the CPU."""

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **unused: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, 1, H] -> ([T, 1, H], None)."""
        if hidden_states.device.type != "cpu" or per_token_scale is not None or self.config.activation_func_clamp_value is not None:
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


class Router(TopKRouter):
    """Megatron's router, whose load-balancing losses count as means over micro-batches (`step` sets their scale)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calculate_per_token_loss = False  # it would multiply by a number of tokens by which nothing is divided here

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Megatron's own applies the mask [T] to the last dimension of the map [T, E], which fails."""
        super()._apply_expert_bias(routing_map if padding_mask is None else routing_map & ~padding_mask[:, None])


def layer_spec(config: TransformerConfig, *, stage: int | None = None, last: bool = True) -> TransformerBlockSubmodules:
    """The submodules of this pipeline rank's decoder layers, of chunk `stage` where there are several. `last`: the output layer follows."""
    engine = has_transformer_engine()
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=engine, normalization=config.normalization, vp_stage=stage)
    for layer in spec.layer_specs:
        mlp = layer.submodules.mlp
        if mlp.func is MoELayer:
            layer.submodules.mlp = partial(MoELayer, submodules=replace(mlp.keywords["submodules"], router=Router))
        elif not engine and config.gated_linear_unit and config.activation_func is torch.nn.functional.silu and not config.add_bias_linear:
            inner = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
            layer.submodules.mlp = partial(GatedMLP.as_mlp_submodule, submodules=inner)
        if not engine:
            _put_ours(layer.submodules, config)
    if engine:
        return spec
    layers = list(spec.layer_specs)
    if last:
        layers[-1] = replace(layers[-1], module=LastLayer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


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
