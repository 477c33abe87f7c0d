"""A model's shape in the names of Megatron's arguments."""

from __future__ import annotations

import math
from typing import Any

from vime.backends.megatron_utils.convert.shape import ModelShape
from vime.errors import ConfigError

__all__ = ["shape_arguments"]

YARN = {"rope_type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings"}
ROPE_KEYS = {  # what may stand in rope_parameters beside rope_theta
    "default": {"rope_type"},
    "linear": {"rope_type", "factor"},
    "llama3": {"rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": YARN,
}


def shape_arguments(shape: ModelShape, *, tensor_parallel: int, divisible_by: int) -> dict[str, Any]:
    """Megatron's names for a model's shape. Raises ConfigError when tensor parallelism does not divide it."""
    if problems := _undivided(shape, tensor_parallel):
        raise ConfigError(*problems)
    multiple = math.lcm(divisible_by, tensor_parallel)
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_size,
        "num_attention_heads": shape.num_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "layernorm_zero_centered_gamma": shape.unit_norms,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "attention_output_gate": shape.output_gate,
        "position_embedding_type": "rope",
        "rotary_base": int(shape.rope_theta) if shape.rope_theta.is_integer() else shape.rope_theta,
        "rotary_percent": shape.rotary_part,
        "rotary_interleaved": False,
        **_rope_arguments(shape),
        **_latent_arguments(shape),
        **_delta_arguments(shape),
        **_expert_arguments(shape),
        "untie_embeddings_and_output_weights": not shape.tied,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab_size,
        "padded_vocab_size": -(-shape.vocab_size // multiple) * multiple,
    }


def _undivided(shape: ModelShape, tensor_parallel: int) -> list[str]:
    counts = {
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_groups,
        "intermediate_size": 0 if shape.experts is not None and all(shape.experts.layers) else shape.ffn_size,
    }
    if shape.latent is not None:
        counts |= {"q_lora_rank": shape.latent.query_rank, "kv_lora_rank + qk_rope_head_dim": shape.latent.key_rank + shape.latent.rope_dim}
    if shape.delta is not None:
        counts |= {"linear_num_key_heads": shape.delta.num_keys, "linear_num_value_heads": shape.delta.num_values}
    return [
        f"--tensor-model-parallel-size {tensor_parallel} does not divide {what} ({count}) of {shape.path}."
        for what, count in counts.items()
        if count % tensor_parallel
    ]


def _latent_arguments(shape: ModelShape) -> dict[str, Any]:
    latent = shape.latent
    if latent is None:
        grouped = {"group_query_attention": True, "num_query_groups": shape.num_groups, "kv_channels": shape.head_dim}
        return grouped | {"multi_latent_attention": False}
    yarn = shape.rope_scaling.get("rope_type") == "yarn"
    out: dict[str, Any] = {
        "multi_latent_attention": True,
        "kv_channels": latent.plain_dim,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_type": "yarn" if yarn else "rope",
        "rotary_scaling_factor": 1.0,
        "mscale_all_dim": 0.0,
    }
    if yarn:
        scaling = shape.rope_scaling
        out |= {"rotary_scaling_factor": float(scaling["factor"]), "mscale": float(scaling.get("mscale", 1.0))}
        out |= {"mscale_all_dim": float(scaling.get("mscale_all_dim", 0.0))}
        out |= {"beta_fast": float(scaling.get("beta_fast", 32)), "beta_slow": float(scaling.get("beta_slow", 1))}
        out |= {"original_max_position_embeddings": int(scaling.get("original_max_position_embeddings", shape.max_positions))}
    return out


def _delta_arguments(shape: ModelShape) -> dict[str, Any]:
    delta = shape.delta
    if delta is None:
        return {"experimental_attention_variant": None}
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(linear) for linear in delta.layers],
        "linear_conv_kernel_dim": delta.kernel,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_num_key_heads": delta.num_keys,
        "linear_num_value_heads": delta.num_values,
    }


def _expert_arguments(shape: ModelShape) -> dict[str, Any]:
    experts = shape.experts
    if experts is None:
        return {"num_experts": None}
    out: dict[str, Any] = {
        "num_experts": experts.num_experts,
        "moe_layer_freq": 1 if all(experts.layers) else [int(mixed) for mixed in experts.layers],
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_router_topk": experts.top_k,
        "moe_router_score_function": "sigmoid" if experts.sigmoid else "softmax",
        "moe_router_enable_expert_bias": experts.selection_bias,
        "moe_router_num_groups": experts.num_limited,
        "moe_router_group_topk": experts.top_limited,
        "moe_router_topk_scaling_factor": experts.scaling,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size or None,
        "moe_shared_expert_gate": experts.shared_gate,
    }
    if not experts.sigmoid:
        out["moe_router_pre_softmax"] = not experts.normalised
    if experts.selection_bias:
        out["moe_router_dtype"] = "fp32"
    return out


def _rope_arguments(shape: ModelShape) -> dict[str, Any]:
    scaling = dict(shape.rope_scaling)
    kind = str(scaling.get("rope_type"))
    none = {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None}
    if kind not in ROPE_KEYS or (kind != "default" and (kind == "yarn") != (shape.latent is not None)):
        raise ConfigError(
            f"{shape.path}: rope_type '{kind}' is not available yet (known: default, linear, llama3; yarn with latent attention)."
        )
    if unknown := set(scaling) - ROPE_KEYS[kind]:
        raise ConfigError(f"{shape.path}: rope_type '{kind}' with {', '.join(sorted(unknown))} is not known.")
    if kind == "linear":
        return none | {"rotary_seq_len_interpolation_factor": scaling["factor"]}
    if kind == "llama3":
        fixed = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
        other = {key: scaling.get(key) for key, value in fixed.items() if scaling.get(key) != value}
        if other:
            raise ConfigError(f"{shape.path}: llama3 rope scaling with {other} is not supported (Megatron has {fixed} built in).")
        return none | {"use_rope_scaling": True, "rope_scaling_factor": scaling["factor"]}
    return none
