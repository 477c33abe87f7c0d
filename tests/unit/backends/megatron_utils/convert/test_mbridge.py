"""The op lists against mbridge, which maps the same models independently (`pip install --no-deps mbridge==0.15.1`; skipped without it).

Its own models need Transformer Engine; its names and tensor functions do not. It names norms and experts as Transformer Engine's layers do.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.tiny_models import write_model
from vime.backends.megatron_utils.convert.ops import Op
from vime.backends.megatron_utils.convert.registry import model_ops, model_shape

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it misses Apex
    pytest.importorskip("mbridge")
    from mbridge.core.auto_bridge import AutoBridge
    from mbridge.core.parallel_states import ParallelStates
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
PADDED = 96


def their_name(op: Op, family: str, experts: tuple[bool, ...]) -> str:
    """What the parameter is called in a model of Transformer Engine's layers."""
    name = op.megatron
    if (layer := re.match(r"decoder\.layers\.(\d+)\.", name)) is None:
        return name
    if family == "deepseek_v3":
        name = name.replace("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight")
        name = name.replace("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight")
    else:
        name = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    if not experts[int(layer.group(1))]:
        name = name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    return re.sub(r"experts\.local_experts\.(\d+)\.(\w+)\.weight", r"experts.\2.weight\1", name)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_tensors_are_those_of_mbridge(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SimpleNamespace(gated_linear_unit=True, mtp_num_layers=None)
    monkeypatch.setattr(DeepseekV3Bridge, "_build_config", lambda _self: plain)  # its own is of arguments that Megatron 0.19 does not have
    folder = write_model(family, tmp_path / family)
    shape = model_shape(folder)
    ops = model_ops(shape, PADDED)
    states: Any = ParallelStates(tp_size=2)
    config = AutoConfig.from_pretrained(folder)
    bridge = AutoBridge.from_config(config, parallel_states=states, dtype=torch.float32, make_vocab_size_divisible_by=PADDED)
    bridge.vocab_size, bridge.padded_vocab_size = shape.vocab_size, PADDED
    experts = shape.experts.layers if shape.experts is not None else (False,) * shape.num_layers
    torch.manual_seed(0)
    for op in ops:
        name = their_name(op, family, experts)
        assert tuple(bridge._weight_name_mapping_mcore_to_hf(name)) == op.hf
        parts = [torch.randn(size) for size in op.hf_shapes]
        whole = op.fuse(parts)
        assert torch.equal(bridge._weight_to_mcore_format(name, parts), whole), name
        _, back = bridge._weight_to_hf_format(name, whole)
        assert all(torch.equal(a, b) for a, b in zip(back, op.split(whole), strict=True)), name
        ours = [op.shard(whole, rank, 2) for rank in range(2)]
        theirs = bridge._weight_split_across_tp(name, whole, SimpleNamespace(shape=ours[0].shape), 2)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), name
    known = {name for op in ops for name in op.hf}
    assert len(known) == sum(len(op.hf) for op in ops)
