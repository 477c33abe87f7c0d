"""The plan counts the adapters that the trainer builds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.plan.configs import CONFIGS, config_json, settings
from vime.plan.adapters import adapter_weights, linears
from vime.plan.trainer import held, role_weights, stage_weights, sync_items, train_items

SMALL = ["qwen3-0.6b", "llama3-8b", "qwen3-moe-mixed", "qwen3.5-small", "qwen3.5-moe-small", "qwen3-next-80b", "qwen3-30b-a3b"]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("targets", [[], ["q_proj", "down_proj"]])
def test_factors_are_counted_exactly(tmp_path: Path, name: str, targets: list[str]) -> None:
    from vime.backends.megatron_utils.convert.registry import model_ops, model_shape
    from vime.backends.megatron_utils.lora_ops import adapter_ops

    s = settings(tmp_path, name, lora_rank=4, lora_target_modules=targets)
    shape = model_shape(tmp_path)
    found = adapter_ops(model_ops(shape, shape.vocab_size), rank=4, targets=targets)
    exact = sum(op.num_elements for one in found for op in (one.a, one.b))
    exact -= sum(4 * one.b.hf_shapes[i][0] for one in found for i in range(len(one.b.hf)) if i not in one.parts)
    assert sum(adapter_weights(s, list(range(s.model.layers)))) == exact


def test_names_are_those_that_the_trainer_knows(tmp_path: Path) -> None:
    names = set()
    for name in CONFIGS:
        s = settings(tmp_path, name)
        names |= {one.name for layer in range(s.model.layers) for one in linears(s.model, layer)}
        assert json.loads((tmp_path / "config.json").read_text()) == config_json(name)
    assert {"q_proj", "down_proj", "kv_b_proj", "in_proj_qkvz", "in_proj_a", "out_proj"} <= names


def sizes(folder: Path, **changes: Any) -> dict[str, int]:
    s = settings(folder, "qwen3-4b", **changes)
    return {item.name: item.num_bytes for item in [*held(s, 0), *train_items(s, 0), *sync_items(s, 0)]}


def test_only_adapters_have_gradients_and_moments(tmp_path: Path) -> None:
    s = settings(tmp_path, "qwen3-4b", lora_rank=16)
    whole, adapted = sizes(tmp_path), sizes(tmp_path, lora_rank=16)
    count = sum(adapter_weights(s, list(range(36))))
    assert adapted["weights"] - whole["weights"] == 2 * count
    assert adapted["gradients"] == 4 * count
    assert adapted["optimizer"] == 12 * count
    assert adapted["activations"] > whole["activations"]
    assert adapted["merged tensor"] == 3 * 9728 * 2560 * 8
    assert "merged tensor" not in whole
    assert count < stage_weights(s, 0).all / 100


def test_factors_are_split_as_their_layers_are(tmp_path: Path) -> None:
    one = settings(tmp_path, "qwen3-4b", lora_rank=16, lora_target_modules=["o_proj"])
    two = replace(one, tensor=2)
    assert sum(adapter_weights(one, [0])) == 16 * (4096 + 2560)
    assert sum(adapter_weights(two, [0])) == 16 * (2048 + 2560)


def test_the_reference_of_adapters_costs_nothing(tmp_path: Path) -> None:
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    assert role_weights(settings(tmp_path, "qwen3-4b", lora_rank=16, **kl), 0).num_bytes == 0
    assert role_weights(settings(tmp_path, "qwen3-4b", lora_rank=16, ref_load="other", **kl), 0).num_bytes > 0
    assert role_weights(settings(tmp_path, "qwen3-4b", **kl), 0).num_bytes > 0
