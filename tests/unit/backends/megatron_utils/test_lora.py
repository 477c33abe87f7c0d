"""Adapters against the formula applied to each Hugging Face layer by itself; their folders; what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.backends.megatron_utils.convert.test_conversion import write_folder
from vime.backends.megatron_utils.convert.ops import Op
from vime.backends.megatron_utils.convert.registry import FAMILIES, model_ops
from vime.backends.megatron_utils.convert.transfer import Ranks
from vime.backends.megatron_utils.lora import Adapter
from vime.backends.megatron_utils.lora_ops import AdapterOps, AdapterSettings, adapter_ops, target_names
from vime.backends.megatron_utils.lora_peft import PeftFolder, adapter_problems, adapter_settings, base_digest, write_peft
from vime.config.sections import LoraConfig
from vime.errors import CheckpointError, ConfigError

RANK, ALPHA = 3, 7.5


def random_factors(found: list[AdapterOps]) -> dict[str, torch.Tensor]:
    """All factors of all adapters under Hugging Face names."""
    generator = torch.Generator().manual_seed(3)
    out = {}
    for one in found:
        pairs = [*zip(one.a.hf, one.a.hf_shapes, strict=True), *((one.b.hf[i], one.b.hf_shapes[i]) for i in one.parts)]
        out |= {name: torch.randn(shape, generator=generator) for name, shape in pairs}
    return out


def adapter_of(one: AdapterOps, factors: dict[str, torch.Tensor], weight: torch.Tensor, ranks: Ranks) -> Adapter:
    layer = SimpleNamespace(weight=weight, tp_group=None, explicit_expert_comm=False, sequence_parallel=False)
    adapter = Adapter(layer, one, AdapterSettings(rank=RANK, alpha=ALPHA, dropout=0.0, targets=()), ranks)
    for op, parameter in ((one.a, adapter.a), (one.b, adapter.b)):
        parts = [factors.get(name, torch.zeros(shape)) for name, shape in zip(op.hf, op.hf_shapes, strict=True)]
        parameter.data.copy_(op.shard(op.fuse(parts), *ranks.of(op)))
    return adapter


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_merges_to_the_shard_of_layers_that_were_merged_one_by_one(tmp_path: Path, architecture: str, rank: int) -> None:
    shape, tensors = write_folder(tmp_path, architecture)
    ranks = Ranks(tensor=rank, tensor_size=2, expert_tensor=rank, expert_tensor_size=2)
    found = adapter_ops(model_ops(shape, 128), rank=RANK, targets=())
    factors = random_factors(found)
    for one in found:
        merged = []
        for name in one.base.hf:
            a, b = (factors[name.removesuffix("weight") + f"lora_{letter}.weight"] for letter in "AB")
            merged.append(tensors[name] + ALPHA / RANK * (b @ a))
        weight = one.base.shard(one.base.fuse([tensors[name] for name in one.base.hf]), *ranks.of(one.base))
        before = weight.clone()
        result = adapter_of(one, factors, weight, ranks).merged(weight)
        torch.testing.assert_close(result, one.base.shard(one.base.fuse(merged), *ranks.of(one.base)), rtol=1e-5, atol=1e-5)
        assert torch.equal(weight, before), "the base stays"


def test_parts_without_an_adapter_stay_as_they_are(tmp_path: Path) -> None:
    shape, tensors = write_folder(tmp_path, "Qwen3ForCausalLM")
    found = adapter_ops(model_ops(shape, 128), rank=RANK, targets=["k_proj", "up_proj"])
    assert [one.base.hf[i].split(".")[-2] for one in found for i in one.parts] == ["k_proj", "up_proj"] * 2
    factors = random_factors(found)
    for one in found:
        weight = one.base.fuse([tensors[name] for name in one.base.hf])
        for i, part in enumerate(one.base.split(adapter_of(one, factors, weight, Ranks()).merged(weight))):
            assert torch.equal(part, tensors[one.base.hf[i]]) == (i not in one.parts)


def test_an_adapter_that_begins_merges_to_the_same_bits(tmp_path: Path) -> None:
    shape, _ = write_folder(tmp_path, "LlamaForCausalLM")
    one = adapter_ops(model_ops(shape, 128), rank=RANK, targets=["o_proj"])[0]
    weight = torch.tensor([[-0.0, 1.0]]).repeat(32, 32)
    merged = adapter_of(one, {}, weight, Ranks()).merged(weight)
    assert torch.equal(merged.view(torch.int32), weight.view(torch.int32))


def ops_in(folder: Path) -> list[Op]:
    shape, _ = write_folder(folder, "Qwen3ForCausalLM")
    return model_ops(shape, 128)


def test_layers_of_all_families_can_have_adapters(tmp_path: Path) -> None:
    names = {architecture: target_names(model_ops(write_folder(tmp_path, architecture)[0], 128)) for architecture in FAMILIES}
    assert names["Qwen3ForCausalLM"] == sorted(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
    assert {"q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} <= set(names["DeepseekV3ForCausalLM"])
    assert {"in_proj_qkvz", "in_proj_ba", "out_proj"} <= set(names["Qwen3NextForCausalLM"])
    assert not any(other in found for found in names.values() for other in ("gate", "conv1d", "embed_tokens", "lm_head"))


def test_a_target_that_is_none_is_refused_with_the_nearest(tmp_path: Path) -> None:
    problems = adapter_problems(LoraConfig(lora_rank=4, lora_target_modules=["q_prj", "lm_head"]), ops_in(tmp_path), tmp_path)
    assert len(problems) == 2
    assert problems[1].startswith("--lora-target-modules q_prj: the model has no such linear layer. Did you mean q_proj?")


def written(folder: Path, ops: list[Op]) -> Path:
    """A PEFT folder of adapters on q_proj and down_proj."""
    found = adapter_ops(ops, rank=RANK, targets=["q_proj", "down_proj"])
    settings = AdapterSettings(rank=RANK, alpha=ALPHA, dropout=0.1, targets=("down_proj", "q_proj"))
    write_peft(folder, settings, found, random_factors(found), base="somewhere")
    return folder


def test_a_folder_gives_back_what_was_written(tmp_path: Path) -> None:
    ops = ops_in(tmp_path)
    folder = written(tmp_path / "adapter", ops)
    settings = adapter_settings(LoraConfig(lora_rank=RANK, lora_load=str(folder)), ops)
    assert settings == AdapterSettings(rank=RANK, alpha=ALPHA, dropout=0.0, targets=("down_proj", "q_proj"))
    found = adapter_ops(ops, rank=RANK, targets=settings.targets)
    source = PeftFolder(folder)
    source.check(found)
    factors = random_factors(found)
    for name, tensor in factors.items():
        read = source.tensor(name, tuple(tensor.shape))
        assert read is not None
        assert torch.equal(read, tensor)
    assert source.tensor("model.layers.0.self_attn.k_proj.lora_B.weight", (32, RANK)) is None
    names = set(load_file(folder / "adapter_model.safetensors"))
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert len(names) == len(factors) == 2 * 2 * 2


def test_without_a_folder_the_scale_is_two_and_all_layers_are_adapted(tmp_path: Path) -> None:
    settings = adapter_settings(LoraConfig(lora_rank=8), ops_in(tmp_path))
    assert settings.scale == 2.0
    assert len(settings.targets) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": 4}, "--lora-rank 4: the adapters in .* have 3."),
        ({"lora_alpha": 3.0}, "--lora-alpha 3.0: the adapters in .* have 7.5."),
        ({"lora_target_modules": ["q_proj"]}, "--lora-target-modules q_proj: the adapters in .* have down_proj q_proj."),
    ],
)
def test_flags_that_contradict_the_folder_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    ops = ops_in(tmp_path)
    folder = written(tmp_path / "adapter", ops)
    with pytest.raises(ConfigError, match=message):
        adapter_settings(LoraConfig(**{"lora_rank": RANK, "lora_load": str(folder)} | changes), ops)


def test_folders_of_other_kinds_and_torn_ones_are_refused(tmp_path: Path) -> None:
    ops = ops_in(tmp_path)
    folder = written(tmp_path / "adapter", ops)
    lora = LoraConfig(lora_rank=RANK, lora_load=str(folder))
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    good, tensors = config.read_text(), load_file(weights)
    config.write_text(json.dumps(json.loads(good) | {"use_dora": True}))
    assert re.search("use_dora True is not supported", adapter_problems(lora, ops, tmp_path)[0])
    config.write_text("{")
    assert re.search("it is no folder of a PEFT LoRA adapter", adapter_problems(lora, ops, tmp_path)[0])
    config.write_text(good)
    first, *rest = sorted(tensors)
    save_file({name: tensors[name] for name in rest} | {"more": torch.zeros(1)}, weights)
    (problem,) = adapter_problems(lora, ops, tmp_path)
    assert f"'{first}' is missing" in problem
    assert "'more' belongs to no layer that is adapted" in problem
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        PeftFolder(folder)


def test_adapters_of_another_base_are_refused(tmp_path: Path) -> None:
    ops = ops_in(tmp_path)
    found = adapter_ops(ops, rank=RANK, targets=["q_proj"])
    settings = AdapterSettings(rank=RANK, alpha=ALPHA, dropout=0.0, targets=("q_proj",))
    factors, folder = random_factors(found), tmp_path / "adapter"
    lora = LoraConfig(lora_rank=RANK, lora_load=str(folder))
    for digest, problems in ((base_digest(tmp_path), 0), (None, 0), ("of another", 1)):  # PEFT's own say nothing of their base
        write_peft(folder, settings, found, factors, base="somewhere", digest=digest)
        said = adapter_problems(lora, ops, tmp_path)
        assert len(said) == problems
    assert re.search("--lora-load: the adapters in .* were trained on other weights than those in .*--hf-checkpoint", said[0])


@pytest.mark.parametrize("how", ["pissa", "pissa_niter_16", "PiSSA", "olora", "corda", "loftq", "lora_ga"])
def test_adapters_that_began_by_changing_the_base_are_refused(tmp_path: Path, how: str) -> None:
    ops = ops_in(tmp_path)
    config = written(tmp_path / "adapter", ops) / "adapter_config.json"
    good = json.loads(config.read_text())
    lora = LoraConfig(lora_rank=RANK, lora_load=str(config.parent))
    for plain in (True, False, "gaussian", "eva", "orthogonal"):
        config.write_text(json.dumps(good | {"init_lora_weights": plain}))
        assert adapter_problems(lora, ops, tmp_path) == []
    config.write_text(json.dumps(good | {"init_lora_weights": how}))
    (said,) = adapter_problems(lora, ops, tmp_path)
    assert f"init_lora_weights {how!r} began by changing the base model's weights" in said


def test_the_digest_tells_base_models_apart(tmp_path: Path) -> None:
    _, tensors = write_folder(tmp_path, "Qwen3ForCausalLM")
    first = base_digest(tmp_path)
    assert base_digest(tmp_path) == first
    save_file({name: tensor + 1e-3 for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert base_digest(tmp_path) != first
