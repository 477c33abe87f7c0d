"""Op lists are bijections, and a converted model computes what transformers computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vime.backends.megatron_utils.convert.folder import HFFolder
from vime.backends.megatron_utils.convert.registry import FAMILIES, model_ops, model_shape
from vime.backends.megatron_utils.convert.shape import ModelShape
from vime.backends.megatron_utils.convert.transfer import check_hf_weights
from vime.errors import CheckpointError

SIZE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 90, "max_position_embeddings": 64, "head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [0]}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 24,
    "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
}  # fmt: skip
DELTA = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
}  # fmt: skip
SHARED = {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": []}
OWN: dict[str, dict[str, Any]] = {  # what a config.json has more
    "Qwen3MoeForCausalLM": EXPERTS,
    "DeepseekV3ForCausalLM": LATENT,
    "Qwen3NextForCausalLM": SHARED,
    "Qwen3_5ForCausalLM": DELTA,
    "Qwen3_5MoeForCausalLM": SHARED,
    "Qwen3_5ForConditionalGeneration": DELTA,
    "Qwen3_5MoeForConditionalGeneration": SHARED,
}


def write_folder(
    path: Path, architecture: str, *, tied: bool = False, dtype: torch.dtype = torch.float32, **changes: Any
) -> tuple[ModelShape, dict[str, torch.Tensor]]:
    """A folder of random weights of an architecture, and what it holds."""
    path.mkdir(exist_ok=True)
    text = SIZE | OWN.get(architecture, {}) | changes
    inner = {"text_config": text, "vision_config": {"depth": 1}} if "Conditional" in architecture else text
    (path / "config.json").write_text(json.dumps({"architectures": [architecture], "tie_word_embeddings": tied} | inner))
    shape = model_shape(path)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for op in model_ops(shape, 128):
        tensors |= {name: torch.randn(size, generator=generator).to(dtype) for name, size in zip(op.hf, op.hf_shapes, strict=True)}
    save_file(tensors, str(path / "model.safetensors"))
    return shape, tensors


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_conversion_is_a_bijection(tmp_path: Path, architecture: str, tied: bool, size: int) -> None:
    shape, tensors = write_folder(tmp_path / "m", architecture, tied=tied)
    back: dict[str, torch.Tensor] = {}
    for op in model_ops(shape, 128):
        whole = op.fuse([tensors[name] for name in op.hf])
        shards = [op.shard(whole, rank, size).clone() for rank in range(size)]
        assert torch.equal(op.merge(shards), whole)
        back |= dict(zip(op.hf, op.split(op.merge(shards)), strict=True))
    assert set(back) == set(tensors)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_shards_of_queries_and_gates_hold_whole_heads_and_matching_halves(tmp_path: Path, architecture: str) -> None:
    shape, tensors = write_folder(tmp_path / "m", architecture)
    ops = {op.megatron: op for op in model_ops(shape, 128)}
    qkv, gate = ops["decoder.layers.0.self_attention.linear_qkv.weight"], ops["decoder.layers.0.mlp.linear_fc1.weight"]
    second = qkv.shard(qkv.fuse([tensors[name] for name in qkv.hf]), 1, 2)
    q, k, v = (tensors[name] for name in qkv.hf)
    assert torch.equal(second, torch.cat([q[32:], k[16:], v[16:]]))  # the second group: its two queries, its key, its value
    second = gate.shard(gate.fuse([tensors[name] for name in gate.hf]), 1, 2)
    assert torch.equal(second, torch.cat([tensors[name][24:] for name in gate.hf]))


def test_vocabulary_is_padded_with_zeros_and_cut_back(tmp_path: Path) -> None:
    shape, tensors = write_folder(tmp_path / "m", "Qwen3ForCausalLM")
    op = model_ops(shape, 128)[0]
    whole = op.fuse([tensors["model.embed_tokens.weight"]])
    assert whole.shape == (128, 32)
    assert not whole[90:].any()


def read_all(path: Path) -> None:
    shape = model_shape(path)
    ops = model_ops(shape, 128)
    with HFFolder(path) as folder:
        folder.check_no_others([name for op in ops for name in op.hf])
        for op in ops:
            for name, size in zip(op.hf, op.hf_shapes, strict=True):
                folder.tensor(name, size)


def shard_folder(path: Path) -> None:
    """Split model.safetensors into two files with an index."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[:7], "model-00002-of-00002.safetensors": names[7:]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, str(path / file))
    weight_map = {name: file for file, held in files.items() for name in held}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_sharded_folder_reads_like_a_single_file(tmp_path: Path) -> None:
    _, tensors = write_folder(tmp_path / "m", "Qwen3ForCausalLM")
    shard_folder(tmp_path / "m")
    read_all(tmp_path / "m")
    with HFFolder(tmp_path / "m") as folder:
        assert torch.equal(folder.tensor("model.norm.weight", (32,)), tensors["model.norm.weight"])


def test_experts_that_are_stored_as_one_tensor_are_read_one_by_one(tmp_path: Path) -> None:
    shape, tensors = write_folder(tmp_path / "m", "Qwen3_5MoeForCausalLM")
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        start = f"model.layers.{layer}.mlp.experts."
        both = [torch.cat([tensors[f"{start}{i}.gate_proj.weight"], tensors[f"{start}{i}.up_proj.weight"]]) for i in range(4)]
        stacked[start + "gate_up_proj"] = torch.stack(both)
        stacked[start + "down_proj"] = torch.stack([tensors[f"{start}{i}.down_proj.weight"] for i in range(4)])
    save_file(stacked, str(tmp_path / "m" / "model.safetensors"))
    check_hf_weights(tmp_path / "m", model_ops(shape, 128), shape)
    with HFFolder(tmp_path / "m") as folder:
        assert folder.names == set(tensors)
        assert all(torch.equal(folder.tensor(name, tuple(tensor.shape)), tensor) for name, tensor in tensors.items())
        assert folder.dtype("model.layers.0.mlp.experts.3.up_proj.weight") == torch.float32
        with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.mlp\.experts\.4\.up_proj\.weight' is missing"):
            folder.tensor("model.layers.0.mlp.experts.4.up_proj.weight", (24, 32))


def break_config(path: Path) -> None:
    (path / "config.json").unlink()


def break_json(path: Path) -> None:
    (path / "config.json").write_text('{"architectures": [')


def break_shape_field(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    del config["hidden_size"]
    (path / "config.json").write_text(json.dumps(config))


def break_index(path: Path) -> None:
    shard_folder(path)
    (path / "model-00002-of-00002.safetensors").unlink()


def break_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, str(path / "model.safetensors"))


def break_size(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(31)
    save_file(tensors, str(path / "model.safetensors"))


def break_file(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def add_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.layers.0.mlp.gate_proj.bias": torch.zeros(48)}, str(path / "model.safetensors"))


def remove_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("tear", "message"),
    [
        (break_config, r"config\.json is missing"),
        (break_json, r"config\.json cannot be read as JSON"),
        (break_shape_field, "lacks 'hidden_size'"),
        (break_index, r"model-00002-of-00002\.safetensors is missing; model\.safetensors\.index\.json says it holds"),
        (break_tensor, r"'model\.layers\.1\.self_attn\.k_proj\.weight' is missing"),
        (break_size, r"'model\.norm\.weight' in .* has shape \[31\], config\.json implies \[32\]"),
        (break_file, r"model\.safetensors is torn"),
        (add_tensor, r"1 tensors that the architecture .* does not have: model\.layers\.0\.mlp\.gate_proj\.bias"),
        (remove_weights, "holds neither model.safetensors nor"),
    ],
)
def test_a_torn_folder_is_named(tmp_path: Path, tear: Any, message: str) -> None:
    write_folder(tmp_path / "m", "Qwen3ForCausalLM")
    tear(tmp_path / "m")
    with pytest.raises(CheckpointError, match=message):
        read_all(tmp_path / "m")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        model_shape(tmp_path / "nowhere")


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(CheckpointError, match=r"MambaForCausalLM is not known. Known are .*LlamaForCausalLM, .*Qwen3ForCausalLM"):
        model_shape(tmp_path)


@pytest.mark.parametrize(
    "change", [{"hidden_act": "gelu"}, {"attention_bias": True}, {"use_sliding_window": True}, {"layer_types": ["sliding_attention"] * 2}]
)
def test_what_the_layers_lack_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="not supported"):
        write_folder(tmp_path / "m", "Qwen3ForCausalLM", **change)


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sliding_window", 4096), ("attn_logit_softcapping", 30.0), ("attention_sink", True), ("logit_scale", 0.5),
        ("quantization_config", {"quant_method": "fp8"}), ("residual_multiplier", 2.0),
    ],
)  # fmt: skip
def test_a_key_that_nobody_knows_is_refused_with_its_value(tmp_path: Path, architecture: str, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"what may change the computation: {key} = "):
        write_folder(tmp_path / "m", architecture, **{key: value})


@pytest.mark.parametrize(
    "change", [{"scoring_func": "softmax"}, {"topk_method": "greedy"}, {"num_experts_per_tok": 2}, {"norm_topk_prob": False}]
)
def test_routing_that_megatron_does_otherwise_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="not supported"):
        write_folder(tmp_path / "m", "DeepseekV3ForCausalLM", **change)


def test_keys_that_are_off_or_change_nothing_are_accepted(tmp_path: Path) -> None:
    off = {"sliding_window": 4096, "use_sliding_window": False, "attn_logit_softcapping": None, "resid_pdrop": 0.0, "use_cache": True}
    shape, _ = write_folder(tmp_path / "m", "Qwen3ForCausalLM", **off, torch_dtype="bfloat16", pad_token_id=3)
    assert shape.num_layers == 2
