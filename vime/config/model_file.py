"""What a model's config.json must be before anything is computed from it: an object whose sizes are whole numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["malformed"]

_SIZES = (
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size moe_intermediate_size vocab_size "
    "max_position_embeddings num_experts num_local_experts n_routed_experts num_experts_per_tok decoder_sparse_step moe_layer_freq "
    "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_group topk_group"
).split()
_OBJECTS = ("text_config", "rope_scaling", "rope_parameters")


def malformed(config: Any) -> str | None:
    """The first value of a parsed config.json that cannot be what it must be; None when there is none. null counts as absent."""
    if not isinstance(config, dict):
        return f"the file holds {type(config).__name__}, expected a JSON object"
    return next(_problems(config), None)


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    given = {key: value for key, value in config.items() if value is not None}
    for key in _SIZES:
        value = given.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9:
            yield f"{key} is {value!r}, expected a whole number from 1 to 1e9"
    for key in _OBJECTS:
        if not isinstance(given.get(key, {}), dict):
            yield f"{key} is {given[key]!r}, expected an object"
    names = given.get("architectures", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        yield f"architectures is {names!r}, expected a list of names"
    if isinstance(given.get("text_config"), dict):
        yield from (f"text_config: {problem}" for problem in _problems(given["text_config"]))
