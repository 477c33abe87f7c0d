"""How the trainer's processes share the model: the parallel sizes, read from Megatron's arguments."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

__all__ = ["Layout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel sizes. world = tensor x context x pipeline x data, and = expert_tensor x expert x pipeline x expert data."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None  # model chunks of each pipeline rank; None = 1, not interleaved
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None  # None = as `tensor`
    sequence: bool = False  # activations between layers are split over the tensor-parallel ranks

    @classmethod
    def of(cls, args: argparse.Namespace) -> Layout:
        """From Megatron's arguments."""
        return cls(
            tensor=args.tensor_model_parallel_size,
            pipeline=args.pipeline_model_parallel_size,
            virtual=getattr(args, "virtual_pipeline_model_parallel_size", None),  # there once Megatron has checked them
            context=args.context_parallel_size,
            expert=args.expert_model_parallel_size,
            expert_tensor=args.expert_tensor_parallel_size,
            sequence=args.sequence_parallel,
        )

    def facts(self) -> dict[str, Any]:
        """All sizes and the number of processes, as plain values."""
        return asdict(self) | {"world": dist.get_world_size()}

    @property
    def model(self) -> int:
        """Processes that hold one copy of the model's dense part."""
        return self.tensor * self.pipeline * self.context

    @property
    def experts(self) -> int:
        """Processes that hold one copy of the experts."""
        return (self.expert_tensor or self.tensor) * self.expert * self.pipeline
