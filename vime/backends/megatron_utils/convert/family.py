"""What a model family is to the converter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vime.backends.megatron_utils.convert.fields import Fields
from vime.backends.megatron_utils.convert.ops import Op
from vime.backends.megatron_utils.convert.shape import ModelShape

__all__ = ["Family"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture: how its config.json is read and how its tensors map."""

    architecture: str
    shape: Callable[[Fields], ModelShape]
    ops: Callable[[ModelShape, int], list[Op]]  # (shape, padded vocabulary size)
