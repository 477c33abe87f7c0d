"""A commit of adapters becomes a whole model with the folder that they stand on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.backends.megatron_utils.convert.test_conversion import write_folder
from vime.backends.megatron_utils.convert.checkpoint import megatron_to_hf
from vime.backends.megatron_utils.convert.registry import model_ops
from vime.backends.megatron_utils.convert.writer import keep_model_files
from vime.backends.megatron_utils.lora_ops import AdapterSettings, adapter_ops
from vime.backends.megatron_utils.lora_peft import base_digest, write_peft
from vime.errors import CheckpointError

RANK, ALPHA = 2, 3.0


@pytest.fixture
def commit(tmp_path: Path) -> Path:
    """The trainer's part of a commit of adapters on q_proj and down_proj; the model is in `tmp_path`/model."""
    shape, _ = write_folder(tmp_path / "model", "Qwen3ForCausalLM", dtype=torch.bfloat16)
    found = adapter_ops(model_ops(shape, shape.vocab_size), rank=RANK, targets=["q_proj", "down_proj"])
    names = [(name, size) for one in found for op in (one.a, one.b) for name, size in zip(op.hf, op.hf_shapes, strict=True)]
    factors = {name: torch.randn(size, generator=torch.Generator().manual_seed(i)) for i, (name, size) in enumerate(names)}
    settings = AdapterSettings(rank=RANK, alpha=ALPHA, dropout=0.0, targets=("down_proj", "q_proj"))
    folder = tmp_path / "trainer"
    write_peft(folder / "adapter", settings, found, factors, base="model", digest=base_digest(tmp_path / "model"))
    keep_model_files(tmp_path / "model", folder)
    return folder


def test_adapters_are_merged_in_float32_and_the_rest_is_carried_bit_for_bit(commit: Path, tmp_path: Path) -> None:
    megatron_to_hf(commit, tmp_path / "out", hf_folder=commit / "hf", shard_bytes=10**9)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    factors = {
        name.removeprefix("base_model.model."): value for name, value in load_file(commit / "adapter" / "adapter_model.safetensors").items()
    }
    assert set(after) == set(before)
    merged = 0
    for name, weight in before.items():
        layer = name.removesuffix("weight")
        if f"{layer}lora_A.weight" in factors:
            delta = ALPHA / RANK * factors[f"{layer}lora_B.weight"] @ factors[f"{layer}lora_A.weight"]
            torch.testing.assert_close(after[name], (weight.float() + delta).bfloat16(), rtol=1e-2, atol=1e-3)
            merged += 1
        else:
            assert torch.equal(after[name], weight)
    assert merged == 4
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_model_that_is_gone_or_another_is_refused(commit: Path, tmp_path: Path) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    save_file({name: value + 1 for name, value in load_file(weights).items()}, weights)
    with pytest.raises(CheckpointError, match=r"were trained on other weights than those in .*model: give --hf-checkpoint"):
        megatron_to_hf(commit, tmp_path / "out", hf_folder=commit / "hf", shard_bytes=10**9)
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(CheckpointError, match="holds adapters alone, and the weights that they stand on are not in"):
        megatron_to_hf(commit, tmp_path / "out", hf_folder=commit / "hf", shard_bytes=10**9)
    assert not (tmp_path / "out").exists()
