"""Hugging Face folder to Megatron checkpoint and back, bit for bit; what is torn or foreign is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.backends.megatron_utils.convert.test_conversion import write_folder
from vime.backends.megatron_utils.convert.checkpoint import hf_to_megatron, megatron_to_hf
from vime.backends.megatron_utils.convert.registry import FAMILIES
from vime.errors import CheckpointError, ResourceError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the conversion runs where no GPU is seen")
SHARD_BYTES = 20_000


def read(folder: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        out |= load_file(file)
    return out


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(an HF folder, what it became)."""
    folder = tmp_path_factory.mktemp("converted")
    write_folder(folder / "hf", "Qwen3MoeForCausalLM")
    hf_to_megatron(folder / "hf", folder / "megatron")
    return folder / "hf", folder / "megatron"


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_is_bit_for_bit_the_same(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    _, tensors = write_folder(tmp_path / "hf", architecture, dtype=dtype)
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", hf_folder=tmp_path / "hf", shard_bytes=SHARD_BYTES)
    back = read(tmp_path / "back")
    assert set(back) == set(tensors)
    assert all(back[name].dtype == dtype and torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads((tmp_path / "hf" / "config.json").read_text())


def test_large_models_are_written_in_shards_with_an_index(converted: tuple[Path, Path], tmp_path: Path) -> None:
    hf, megatron = converted
    megatron_to_hf(megatron, tmp_path / "out", hf_folder=megatron / "hf", shard_bytes=SHARD_BYTES)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2
    assert [shard.name for shard in shards] == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for shard in shards:
        tensors = load_file(shard)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= SHARD_BYTES
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(read(hf))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read(hf).values())


def test_a_small_model_is_one_file_without_an_index(converted: tuple[Path, Path], tmp_path: Path) -> None:
    megatron_to_hf(converted[1], tmp_path / "out", hf_folder=converted[0], shard_bytes=10**9)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_layers_that_are_not_trained_are_carried_from_the_models_own_folder(tmp_path: Path) -> None:
    shape, tensors = write_folder(tmp_path / "hf", "DeepseekV3ForCausalLM")
    tensors |= {"model.layers.2.eh_proj.weight": torch.randn(32, 64), "model.layers.2.enorm.weight": torch.randn(32)}
    save_file(tensors, str(tmp_path / "hf" / "model.safetensors"))
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", hf_folder=tmp_path / "megatron" / "hf", shard_bytes=SHARD_BYTES)
    back = read(tmp_path / "back")
    assert shape.carried == ("model.layers.2.",)
    assert set(back) == set(tensors)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    (tmp_path / "hf").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"tensors model\.layers\.2\. are not trained.* give that folder as --hf-checkpoint"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "again", hf_folder=tmp_path / "megatron" / "hf", shard_bytes=SHARD_BYTES)


def test_another_models_checkpoint_is_refused(converted: tuple[Path, Path], tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", "Qwen3MoeForCausalLM", num_hidden_layers=3, tied=True)
    with pytest.raises(
        CheckpointError,
        match=r"holds another model than .*: .*layers\.2\.self_attention\.linear_qkv\.weight' is missing",
    ):
        megatron_to_hf(converted[1], tmp_path / "out", hf_folder=tmp_path / "hf", shard_bytes=10**9)
    write_folder(tmp_path / "dense", "Qwen3ForCausalLM")
    write_folder(tmp_path / "wide", "Qwen3MoeForCausalLM", moe_intermediate_size=40)
    with pytest.raises(CheckpointError, match=r"has shape \[4, 48, 32\] instead of \[4, 80, 32\]"):
        megatron_to_hf(converted[1], tmp_path / "out", hf_folder=tmp_path / "wide", shard_bytes=10**9)
    with pytest.raises(CheckpointError, match=r"linear_fc1\.weight' is missing"):
        megatron_to_hf(converted[1], tmp_path / "out", hf_folder=tmp_path / "dense", shard_bytes=10**9)
    assert not (tmp_path / "out").exists()


def test_weights_that_have_no_place_are_refused(converted: tuple[Path, Path], tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", "Qwen3MoeForCausalLM", tied=True)
    with pytest.raises(CheckpointError, match=r"'output_layer\.weight' has no place in it"):
        megatron_to_hf(converted[1], tmp_path / "out", hf_folder=tmp_path / "hf", shard_bytes=10**9)


def lose_end(path: Path) -> None:
    data = (path / "__0_0.distcp").read_bytes()
    (path / "__0_0.distcp").write_bytes(data[: len(data) // 2])


def lose_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes(b"torn")


def lose_last(path: Path) -> None:
    (path / "metadata.json").unlink()


@pytest.mark.parametrize(("tear", "message"), [(lose_end, "is torn"), (lose_metadata, "is torn"), (lose_last, "no complete Megatron")])
def test_a_torn_checkpoint_is_named(converted: tuple[Path, Path], tmp_path: Path, tear: Any, message: str) -> None:
    shutil.copytree(converted[1], tmp_path / "torn")
    tear(tmp_path / "torn")
    with pytest.raises(CheckpointError, match=message):
        megatron_to_hf(tmp_path / "torn", tmp_path / "out", hf_folder=converted[0], shard_bytes=10**9)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(converted: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        hf_to_megatron(converted[0], tmp_path)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        megatron_to_hf(converted[1], tmp_path, hf_folder=converted[0], shard_bytes=10**9)


def test_a_torn_model_folder_leaves_nothing_behind(converted: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(converted[0], tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").write_bytes((converted[0] / "model.safetensors").read_bytes()[:-64])
    with pytest.raises(CheckpointError, match="torn"):
        hf_to_megatron(tmp_path / "hf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_target_that_cannot_be_written_is_named(converted: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="could not be written"):
        hf_to_megatron(converted[0], tmp_path / "file" / "out")
