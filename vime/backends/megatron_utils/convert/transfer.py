"""Weights between a Hugging Face folder and a built Megatron model, one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from vime.backends.megatron_utils.convert.folder import HFFolder
from vime.backends.megatron_utils.convert.ops import Op
from vime.errors import CheckpointError

__all__ = ["check_hf_weights", "hf_buckets", "load_hf_weights", "parameters_by_name"]

TRANSFORMER_ENGINE_NAMES = (  # the local spec's name, and where Transformer Engine fuses the norm into the next layer
    (".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight"),
    (".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight"),
)


def parameters_by_name(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The model's parameters under the local spec's names, whichever spec it was built with."""
    out = {}
    for name, parameter in model.named_parameters():
        for local, fused in TRANSFORMER_ENGINE_NAMES:
            name = name.replace(fused, local)
        out[name] = parameter
    return out


def check_hf_weights(folder: str | Path, ops: Sequence[Op], *, tied: bool) -> None:
    """Check by the files' headers alone that a folder holds exactly the model's tensors. Raises CheckpointError."""
    with HFFolder(folder) as source:
        source.check_no_others([name for op in ops for name in op.hf] + (["lm_head.weight"] if tied else []))
        for op in ops:
            for name, shape in zip(op.hf, op.hf_shapes, strict=True):
                source.check(name, shape)


@torch.no_grad()
def load_hf_weights(model: torch.nn.Module, folder: str | Path, ops: Sequence[Op], *, rank: int, size: int, tied: bool) -> None:
    """Fill this rank's shard of `model` from a folder. `rank` and `size` are tensor-parallel.

    Raises CheckpointError for a torn folder, and for weights that do not fill the model exactly.
    """
    parameters = parameters_by_name(model)
    unknown = sorted(set(parameters) - {op.megatron for op in ops})
    if unknown:
        raise CheckpointError(f"the model has parameters that no tensor of {folder} fills: {', '.join(unknown)}.")
    check_hf_weights(folder, ops, tied=tied)
    with HFFolder(folder) as source:
        for op in ops:
            whole = op.fuse([source.tensor(name, shape) for name, shape in zip(op.hf, op.hf_shapes, strict=True)])
            parameters[op.megatron].copy_(op.shard(whole, rank, size))


@torch.no_grad()
def hf_buckets(
    model: torch.nn.Module, ops: Sequence[Op], *, bucket_bytes: int, group: dist.ProcessGroup | None, receives: bool, gathers: bool
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The weights under Hugging Face names, gathered over the tensor-parallel `group`, in buckets of about `bucket_bytes`.

    Collective: every rank must exhaust it, and all see the same number of buckets. Only the rank with `receives` gets
    tensors (copies, padding removed), others get empty lists; ranks without `gathers` (other data-parallel replicas) send nothing.
    """
    parameters = parameters_by_name(model)
    bucket: list[tuple[str, torch.Tensor]] = []
    filled = 0
    for op in ops:
        parameter = parameters[op.megatron].detach()
        if receives or gathers:
            whole = _gather(op, parameter, group, receives)
            if whole is not None:
                bucket += [(name, part.contiguous()) for name, part in zip(op.hf, op.split(whole), strict=True)]
        filled += sum(torch.Size(shape).numel() for shape in op.hf_shapes) * parameter.element_size()
        if filled >= bucket_bytes:
            yield bucket
            bucket, filled = [], 0
    if filled:
        yield bucket


def _gather(op: Op, parameter: torch.Tensor, group: dist.ProcessGroup | None, receives: bool) -> torch.Tensor | None:
    """The whole Megatron parameter on the receiving rank; None elsewhere."""
    size = dist.get_world_size(group) if group is not None else 1
    if size == 1 or not op.is_sharded:
        return parameter.clone() if receives else None
    shards = [torch.empty_like(parameter) for _ in range(size)] if receives else None
    dist.gather(parameter.contiguous(), shards, group=group, group_dst=0)
    return op.merge(shards) if shards is not None else None
