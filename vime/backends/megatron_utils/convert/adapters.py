"""A commit of adapters and the model that they stand on, merged into a Hugging Face folder, one Megatron layer at a time."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from vime.backends.megatron_utils.convert.folder import HFFolder
from vime.backends.megatron_utils.convert.registry import model_ops, model_shape
from vime.backends.megatron_utils.convert.transfer import check_hf_weights
from vime.backends.megatron_utils.convert.writer import HFWriter, copy_small_files, own_folder
from vime.backends.megatron_utils.lora_ops import FACTOR_A, FACTOR_B, WEIGHT, adapter_ops
from vime.backends.megatron_utils.lora_peft import ADAPTER_FOLDER, PeftFolder
from vime.errors import CheckpointError

__all__ = ["adapters_to_hf"]


def adapters_to_hf(source: Path, target: Path, *, hf_folder: Path, shard_bytes: int) -> None:
    """Write the merged model of the commit `source` as the new folder `target`; W + alpha / rank B A in float32, in W's dtype.

    The model is the folder `hf_folder`, or the one that this was made of. Raises CheckpointError when it is gone, or holds other
    weights than those that the adapters were trained on.
    """
    model, adapter = own_folder(hf_folder), PeftFolder(source / ADAPTER_FOLDER)
    if not any(model.glob("*.safetensors")):
        raise CheckpointError(
            f"{source} holds adapters alone, and the weights that they stand on are not in {model}: give --hf-checkpoint."
        )
    adapter.check_base(model)
    shape = model_shape(model)
    ops = model_ops(shape, shape.vocab_size)
    check_hf_weights(model, ops, shape)
    adapter.check(adapter_ops(ops, rank=adapter.rank, targets=adapter.targets))
    writer = HFWriter(target, shard_bytes)
    try:
        with HFFolder(model) as weights:
            for op in ops:
                for name, size in zip(op.hf, op.hf_shapes, strict=True):
                    writer.add(name, _merged(weights.tensor(name, size), name, adapter))
        writer.add_carried(model, shape.carried)
        copy_small_files(model, target)
        writer.close()
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _merged(weight: torch.Tensor, name: str, adapter: PeftFolder) -> torch.Tensor:
    layer = name.removesuffix(WEIGHT)
    a, b = (adapter.tensor(layer + factor) for factor in (FACTOR_A, FACTOR_B))
    if a is None or b is None:
        return weight
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=adapter.alpha / adapter.rank).to(weight.dtype)
