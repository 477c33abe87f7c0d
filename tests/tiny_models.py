"""Tiny random models of all families, built by transformers, with weights large enough for a wrong sum to show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SIZE = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
LIMITED = {
    "moe_intermediate_size": 24, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
    "num_key_value_heads": 4, "num_mtp_layers": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_theta": 500.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 32, "rope_theta": 10000.0,
}  # fmt: skip
DELTA = {
    "head_dim": 16, "num_hidden_layers": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "initializer_range": 0.1,
}  # fmt: skip
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 40}
VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32, "num_position_embeddings": 16,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (transformers' class without "Config" or "ForCausalLM", changes of SIZE)
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama3_rope": ("Llama", {"rope_parameters": LLAMA3}),
    "deep": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "num_hidden_layers": 4}),
    "deep_untied": ("Qwen2", {"tie_word_embeddings": False, "num_hidden_layers": 4}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, "tie_word_embeddings": False, **EXPERTS}),
    "qwen3_moe_mixed": ("Qwen3Moe", {"head_dim": 16, **EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [0]}),
    "qwen3_next": ("Qwen3Next", {**DELTA, **SHARED}),
    "qwen3_5": ("Qwen3_5", DELTA),
    "qwen3_5_moe": ("Qwen3_5Moe", {**DELTA, **SHARED}),
    "qwen3_5_images": ("Qwen3_5", {**DELTA, "vision_config": VISION}),
    "qwen3_5_moe_images": ("Qwen3_5Moe", {**DELTA, **SHARED, "vision_config": VISION}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, **LIMITED}),
    "deepseek_v3_yarn": ("DeepseekV3", {**LATENT, **LIMITED, "rope_parameters": YARN}),
}


def write_model(name: str, folder: Path) -> Path:
    """Build the model and save it in `folder`, which is returned."""
    import transformers

    family, changes = MODELS[name]
    torch.manual_seed(0)
    text = {key: value for key, value in (SIZE | changes).items() if key != "vision_config"}
    if family == "Qwen3_5Moe":
        del text["intermediate_size"], text["norm_topk_prob"]  # which it does not have
    if "vision_config" in changes:
        config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=changes["vision_config"])
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    else:
        config = getattr(transformers, f"{family}TextConfig" if family.startswith("Qwen3_5") else f"{family}Config")(**text)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "norm" in key or key.endswith(("bias", "A_log")):
                tensor.add_(0.3 * torch.randn_like(tensor))
            elif key.endswith(("conv1d.weight", "mlp.gate.weight")):
                tensor.copy_(0.3 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return folder


def add_prediction(folder: Path) -> Path:
    """Give a model that `write_model` wrote a layer for multi-token prediction, random as the rest; its folder is returned."""
    from safetensors.torch import load_file, save_file

    from vime.backends.megatron_utils.convert.registry import model_ops, model_shape
    from vime.backends.megatron_utils.convert.shape import with_prediction

    config = json.loads((folder / "config.json").read_text())
    if config["architectures"] == ["DeepseekV3ForCausalLM"]:
        config["num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))
    shape = with_prediction(model_shape(folder), None)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for op in model_ops(shape, shape.vocab_size):
        for name, size in zip(op.hf, op.hf_shapes, strict=True):
            if op.megatron.startswith("mtp."):
                around = 1.0 if "norm" in name and not shape.unit_norms else 0.0
                weights[name] = around + 0.2 * torch.randn(size, generator=generator)
    assert shape.prediction is not None
    weights |= {copy: weights[original].clone() for copy, original in shape.prediction.copies.items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
