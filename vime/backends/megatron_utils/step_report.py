"""What a step's metrics say of all ranks together. Collective over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from vime.packing.pack import PackedBatch

__all__ = ["samples_not_finite", "slowest", "throughput"]

NAMES_SHOWN = 20


def slowest(seconds: dict[str, float], device: torch.device) -> dict[str, float]:
    """perf/X_time: seconds of the slowest rank in each phase."""
    names = sorted(seconds)
    values = torch.tensor([seconds[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return {f"perf/{name}_time": value for name, value in zip(names, values.tolist(), strict=True)}


def throughput(num_tokens: int, seconds: float, group: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
    """Tokens a second of the slowest rank; `num_tokens` of this data-parallel rank are added up over `group`."""
    tokens = torch.tensor(float(num_tokens), dtype=torch.float64, device=device)
    dist.all_reduce(tokens, group=group)
    rate = torch.tensor(float(tokens) / max(seconds, 1e-9), dtype=torch.float64, device=device)
    dist.all_reduce(rate, op=dist.ReduceOp.MIN)
    return {"perf/actor_train_tok_per_s": float(rate)}


def samples_not_finite(loss: float, packed: Sequence[PackedBatch], parts: Sequence[dict[str, torch.Tensor]]) -> str:
    """The samples of the micro-batches whose share of the loss is not finite, in words; of all where the loss itself is finite."""
    seen = zip(packed, parts, strict=True) if parts else ()  # the last pipeline stage alone has losses
    mine = [i for micro, part in seen if not torch.isfinite(part["loss"]) for i in micro.sample_ids]
    if math.isfinite(loss):
        mine = [i for micro in packed for i in micro.sample_ids]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    ids = sorted({i for part in found for i in part})
    shown = ", ".join(map(str, ids[:NAMES_SHOWN])) + (f" and {len(ids) - NAMES_SHOWN} more" if len(ids) > NAMES_SHOWN else "")
    return shown or "none by themselves"
