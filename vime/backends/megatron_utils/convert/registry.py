"""The model families that are known. A new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from vime.backends.megatron_utils.convert import deepseek_v3, llama, qwen2, qwen3, qwen3_5, qwen3_moe, qwen3_next
from vime.backends.megatron_utils.convert.family import Family
from vime.backends.megatron_utils.convert.fields import read_config
from vime.backends.megatron_utils.convert.ops import Op
from vime.backends.megatron_utils.convert.shape import ModelShape, with_prediction
from vime.config.sections import TrainingConfig
from vime.errors import CheckpointError

__all__ = ["FAMILIES", "model_ops", "model_shape", "trained_shape"]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.architecture: family
        for family in (
            llama.FAMILY,
            qwen2.FAMILY,
            qwen3.FAMILY,
            qwen3_moe.FAMILY,
            qwen3_next.FAMILY,
            *qwen3_5.FAMILIES,
            deepseek_v3.FAMILY,
        )
    }
)


def model_shape(folder: str | Path) -> ModelShape:
    """Read the shape of the model in a Hugging Face folder. Raises CheckpointError for a torn folder, an unknown
    architecture, and a key that its family does not know."""
    fields = read_config(folder)
    family = FAMILIES.get(fields.architecture)
    if family is None:
        raise CheckpointError(
            f"{fields.path}: architecture {fields.architecture} is not known. "
            f"Known are {', '.join(sorted(FAMILIES))}; a new one is one short file (docs/add_a_model.md)."
        )
    shape = family.shape(fields)
    fields.check_all_read()
    return shape


def trained_shape(folder: str | Path, training: TrainingConfig) -> ModelShape:
    """The same, with the layers for multi-token prediction where `training` asks for them. Raises ConfigError where there are none."""
    shape = model_shape(folder)
    return with_prediction(shape, training.mtp_num_layers) if training.enable_mtp_training else shape


def model_ops(shape: ModelShape, padded_vocab_size: int) -> list[Op]:
    """The op list of the model's family."""
    return FAMILIES[shape.architecture].ops(shape, padded_vocab_size)
