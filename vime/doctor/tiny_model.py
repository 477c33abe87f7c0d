"""The self-test's model: a Hugging Face folder with a random Qwen3 of 2 layers and a tokenizer of single characters.

Written with numpy alone, so that the engine can begin to start before torch is even imported.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

__all__ = ["CONTEXT", "VOCABULARY", "write_tiny_model"]

VOCABULARY = 128
CONTEXT = 256  # tokens
_HIDDEN, _FFN, _LAYERS, _HEADS, _KV_HEADS, _HEAD = 64, 128, 2, 4, 2, 32
_SPREAD = 0.15  # of the weights: log-probs then differ enough for a wrong layer to show


def write_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write config.json, model.safetensors (float32) and the tokenizer; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": _HIDDEN,
        "intermediate_size": _FFN, "num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS, "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD, "max_position_embeddings": CONTEXT, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": True, "initializer_range": _SPREAD,
        "use_cache": True, "dtype": "float32", "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(_weights(seed), str(folder / "model.safetensors"), metadata={"format": "pt"})
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<bos>", "\n", *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def _weights(seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """name -> [out, in], or [size] of a norm."""
    generator = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, _HIDDEN), "model.norm.weight": (_HIDDEN,)}
    for layer in range(_LAYERS):
        parts = {
            "input_layernorm": (_HIDDEN,), "post_attention_layernorm": (_HIDDEN,),
            "self_attn.q_proj": (_HEADS * _HEAD, _HIDDEN), "self_attn.k_proj": (_KV_HEADS * _HEAD, _HIDDEN),
            "self_attn.v_proj": (_KV_HEADS * _HEAD, _HIDDEN), "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD),
            "self_attn.q_norm": (_HEAD,), "self_attn.k_norm": (_HEAD,),
            "mlp.gate_proj": (_FFN, _HIDDEN), "mlp.up_proj": (_FFN, _HIDDEN), "mlp.down_proj": (_HIDDEN, _FFN),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return {name: generator.normal(float(len(shape) == 1), _SPREAD, shape).astype(np.float32) for name, shape in shapes.items()}
