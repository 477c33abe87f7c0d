"""The shape of a model, read from the config.json of its Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vime.errors import CheckpointError

__all__ = ["ModelShape", "common_shape", "read_config"]

MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What Megatron needs to know to build a dense decoder. Sizes are of the whole model, before tensor parallelism."""

    architecture: str  # "Qwen3ForCausalLM"
    path: str  # of config.json, for messages
    num_layers: int
    hidden_size: int
    num_heads: int
    num_groups: int  # key/value heads
    head_dim: int
    ffn_size: int
    vocab_size: int  # without padding
    norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any]  # rope_type, factor, ... ; rope_type "default" for none
    max_positions: int
    tied: bool  # the output layer is the embedding
    attention_dropout: float
    qk_norm: bool  # RMSNorm on each head of queries and keys
    qkv_bias: bool


def read_config(folder: str | Path) -> tuple[dict[str, Any], str]:
    """(the parsed config.json, its path). Raises CheckpointError when it is missing or no JSON object."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise CheckpointError(
            f"model folder {folder} does not exist. --hf-checkpoint takes a local folder with config.json and *.safetensors."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the folder is no complete Hugging Face model. Copy or download it again.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}). Copy or download the folder again.") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds {type(config).__name__}, expected a JSON object. Copy or download the folder again.")
    return config, str(path)


def common_shape(config: Mapping[str, Any], path: str, *, qk_norm: bool, qkv_bias: bool, needs_head_dim: bool = False) -> ModelShape:
    """The fields that all dense families name alike. Raises CheckpointError for what is missing or not supported."""

    def get(key: str, default: Any = MISSING) -> Any:
        value = config.get(key, default)
        if value is None and default is not MISSING:
            value = default
        if value is MISSING or value is None:
            raise CheckpointError(f"{path} lacks '{key}', which {config.get('architectures')} needs. Copy or download the folder again.")
        return value

    if (activation := get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"{path}: hidden_act '{activation}' is not supported (only 'silu').")
    if get("use_sliding_window", False):
        raise CheckpointError(
            f"{path}: use_sliding_window is not supported. Set it to false if the trained contexts are shorter than the window."
        )
    for key in ("mlp_bias", "attention_bias"):
        if get(key, False):
            raise CheckpointError(f"{path}: {key} is not supported: it puts biases where Megatron's layer has none.")
    heads, hidden = int(get("num_attention_heads")), int(get("hidden_size"))
    head_dim = int(get("head_dim") if needs_head_dim else get("head_dim", hidden // heads))
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    scaling.setdefault("rope_type", scaling.pop("type", "default"))
    return ModelShape(
        architecture=config["architectures"][0],
        path=path,
        num_layers=int(get("num_hidden_layers")),
        hidden_size=hidden,
        num_heads=heads,
        num_groups=int(get("num_key_value_heads", heads)),
        head_dim=head_dim,
        ffn_size=int(get("intermediate_size")),
        vocab_size=int(get("vocab_size")),
        norm_eps=float(get("rms_norm_eps", 1e-6)),
        rope_theta=float(scaling.pop("rope_theta", None) or get("rope_theta", 10000.0)),
        rope_scaling=MappingProxyType(scaling),
        max_positions=int(get("max_position_embeddings")),
        tied=bool(get("tie_word_embeddings", False)),
        attention_dropout=float(get("attention_dropout", 0.0)),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
    )
