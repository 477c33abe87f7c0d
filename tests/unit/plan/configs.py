"""Published shapes, and a run to plan."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from vime.config import RunConfig
from vime.config import sections as s
from vime.plan.settings import PlanOptions, Settings, settings_of


def _shape(
    vocab: int, hidden: int, ffn: int, layers: int, heads: int, groups: int, head_dim: int, tied: bool, **more: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40960,
        **more,
    }


_EXPERTS = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 32}
_LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_V3_EXPERTS = {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
}
_V3_LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_30B = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32}
_DELTA["linear_conv_kernel_dim"] = 4
_NEXT_DELTA = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
_NEXT = _NEXT_DELTA | {"linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
_SHARED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
_MIXED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 2, "mlp_only_layers": [3]}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": ("Qwen3", _shape(151936, 1024, 3072, 28, 16, 8, 128, True)),
    "qwen3-4b": ("Qwen3", _shape(151936, 2560, 9728, 36, 32, 8, 128, True)),
    "qwen2.5-7b": ("Qwen2", _shape(152064, 3584, 18944, 28, 28, 4, 128, False)),
    "llama3-8b": ("Llama", _shape(128256, 4096, 14336, 32, 32, 8, 128, False)),
    "qwen3-30b-a3b": ("Qwen3Moe", _shape(151936, 2048, 6144, 48, 32, 4, 128, False, **_30B)),
    "qwen3-moe-mixed": ("Qwen3Moe", _shape(1000, 64, 96, 6, 4, 2, 32, True, **_MIXED)),
    "qwen3-next-80b": ("Qwen3Next", _shape(151936, 2048, 5120, 48, 16, 2, 256, False, shared_expert_intermediate_size=512, **_NEXT)),
    "qwen3.5-small": ("Qwen3_5", _shape(1000, 64, 96, 6, 4, 2, 32, True, **_DELTA)),
    "qwen3.5-moe-small": ("Qwen3_5Moe", _shape(1000, 64, 96, 4, 4, 2, 32, False, **_DELTA, **_SHARED)),
    "deepseek-v3": ("DeepseekV3", _shape(129280, 7168, 18432, 61, 128, 128, 56, False, **_V3_EXPERTS, **_V3_LATENT)),
    "deepseek-lite": ("DeepseekV3", _shape(1000, 64, 96, 3, 4, 4, 16, False, n_group=2, topk_group=1, **_EXPERTS, **_LATENT)),
}  # fmt: skip


def config_json(name: str) -> dict[str, Any]:
    """What the model's config.json says."""
    family, values = CONFIGS[name]
    return {"architectures": [f"{family}ForCausalLM"], **values}


def settings(
    folder: Path, name: str, megatron: dict[str, Any] | None = None, *, options: PlanOptions | None = None, **changes: Any
) -> Settings:
    """The settings of a GPU run of 32 prompts x 8 samples of up to 1024 + 7168 tokens; `changes` replace fields of the sections."""
    (folder / "config.json").write_text(json.dumps(config_json(name)))
    values = {
        "device": "cuda", "hf_checkpoint": str(folder), "rollout_batch_size": 32, "n_samples_per_prompt": 8, "num_rollout": 10,
        "rollout_max_prompt_len": 1024, "rollout_max_response_len": 7168, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 16384,
        "actor_num_gpus_per_node": 1, "rollout_num_gpus": 1,
    } | changes  # fmt: skip
    vllm_tokens = tuple(values.pop("vllm_tokens", ()))
    config = RunConfig(megatron=megatron or {}, vllm_tokens=vllm_tokens)
    for section in dataclasses.fields(RunConfig):
        part = getattr(config, section.name)
        if dataclasses.is_dataclass(part):
            known = {field.name for field in dataclasses.fields(part)}
            mine = {key: values.pop(key) for key in list(values) if key in known}
            config = dataclasses.replace(config, **{section.name: dataclasses.replace(part, **mine)})  # type: ignore[type-var]
    assert not values, f"no section has {sorted(values)}"
    assert isinstance(config.cluster, s.ClusterConfig)
    return settings_of(config, options or PlanOptions())
