"""What a config.json must be before anything is computed from it."""

from __future__ import annotations

from typing import Any

import pytest

from vime.config.model_file import malformed


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([], "the file holds list, expected a JSON object"),
        ({"hidden_size": "512"}, "hidden_size is '512', expected a whole number"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5, expected a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, expected"),
        ({"vocab_size": True}, "vocab_size is True, expected"),
        ({"vocab_size": 10**18}, "from 1 to 1e9"),
        ({"rope_scaling": [1]}, "rope_scaling is [1], expected an object"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures is 'Qwen3ForCausalLM', expected a list of names"),
        ({"text_config": {"hidden_size": -1}}, "text_config: hidden_size is -1, expected"),
    ],
)
def test_a_value_that_cannot_be_is_named(config: Any, said: str) -> None:
    assert said in (malformed(config) or "")


def test_null_counts_as_absent() -> None:
    assert malformed({"hidden_size": 8, "num_key_value_heads": None, "rope_scaling": None, "text_config": None}) is None
