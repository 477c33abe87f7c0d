"""Parameters counted from config.json against models that transformers builds without memory (the meta device)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.unit.plan.configs import CONFIGS, config_json
from vime.backends.megatron_utils.convert.registry import FAMILIES
from vime.errors import CheckpointError
from vime.plan.shape import KNOWN, model_size, read_model


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_transformers(name: str) -> None:
    family, values = CONFIGS[name]
    config = getattr(transformers, f"{family}TextConfig" if family.startswith("Qwen3_5") else f"{family}Config")(**values)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert model_size(config_json(name)).parameters == expected
    assert model_size({**config.to_dict(), "architectures": [f"{family}ForCausalLM"]}).parameters == expected, "as transformers writes it"


def test_of_a_model_that_sees_images_the_text_part_is_counted() -> None:
    text = config_json("qwen3.5-small")
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "tie_word_embeddings": False, "vision_config": {}}
    size = model_size(whole)
    assert size.parameters == model_size({**text, "tie_word_embeddings": False}).parameters
    del whole["tie_word_embeddings"]
    assert model_size(whole).parameters == model_size(text).parameters


def test_every_family_that_the_trainer_knows_can_be_planned() -> None:
    assert set(FAMILIES) <= set(KNOWN), "say in vime/plan/shape.py what config.json does not say of it"


def test_a_plain_config_json_is_enough(tmp_path: Path) -> None:
    values = {key: value for key, value in config_json("llama3-8b").items() if key != "head_dim"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = read_model(tmp_path)
    assert model.parameters == 8_030_261_248
    assert model.head_dim == 128, "hidden size over heads where the config does not say"
    assert model.cache_width == 2 * 8 * 128


def test_active_parameters_leave_out_the_idle_experts() -> None:
    model = model_size(config_json("qwen3-30b-a3b"))
    assert model.parameters == 30_532_122_624
    assert 3.3e9 < model.active_parameters < 3.4e9


def test_latent_attention_caches_the_compressed_vector() -> None:
    assert model_size(config_json("deepseek-v3")).cache_width == 512 + 64


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_model(tmp_path)
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_model(tmp_path)
    path.write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(CheckpointError, match="GPT2LMHeadModel is not known to the plan"):
        read_model(tmp_path)
    path.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4}))
    with pytest.raises(CheckpointError, match="lacks 'hidden_size'"):
        read_model(tmp_path)
