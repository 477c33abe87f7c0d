"""The model families that are known. A new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from vime.backends.megatron_utils.convert import llama, qwen2, qwen3
from vime.backends.megatron_utils.convert.family import Family
from vime.backends.megatron_utils.convert.ops import Op
from vime.backends.megatron_utils.convert.shape import ModelShape, read_config
from vime.errors import CheckpointError

__all__ = ["FAMILIES", "model_ops", "model_shape"]

FAMILIES: Mapping[str, Family] = MappingProxyType({module.FAMILY.architecture: module.FAMILY for module in (llama, qwen2, qwen3)})


def model_shape(folder: str | Path) -> ModelShape:
    """Read the shape of the model in a Hugging Face folder. Raises CheckpointError for a torn folder or an unknown architecture."""
    config, path = read_config(folder)
    names = config.get("architectures") or []
    family = FAMILIES.get(names[0]) if names else None
    if family is None:
        raise CheckpointError(
            f"{path}: architecture {names[0] if names else '(none named)'} is not known. "
            f"Known are {', '.join(sorted(FAMILIES))}; a new one is one short file under backends/megatron_utils/convert."
        )
    return family.shape(config, path)


def model_ops(shape: ModelShape, padded_vocab_size: int) -> list[Op]:
    """The op list of the model's family."""
    return FAMILIES[shape.architecture].ops(shape, padded_vocab_size)
