"""Passes over micro-batches with Megatron's schedule: log-probs without gradients, and one optimizer step's gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from vime.backends.megatron_utils.model import forward_logits
from vime.packing.pack import PackedBatch

__all__ = ["LossFunction", "forward_backward", "forward_each", "sum_metrics"]

LossFunction = Callable[[torch.Tensor, PackedBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]  # (logits, packed) -> (loss, sums)


def _forward_step(
    use: Callable[..., Any], whole: bool, batches: Iterator[PackedBatch], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[..., Any]]:
    packed = next(batches)
    return forward_logits(model, packed, None if whole else packed.scored_rows), partial(use, packed)


def _run(model: torch.nn.Module, batches: Sequence[PackedBatch], use: Callable[..., Any], *, whole: bool, forward_only: bool) -> list[Any]:
    longest = max(packed.num_tokens for packed in batches)
    return get_forward_backward_func()(
        forward_step_func=partial(_forward_step, use, whole),
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=longest,
        micro_batch_size=1,
        decoder_seq_length=longest,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def forward_each(
    model: torch.nn.Module, batches: Sequence[PackedBatch], read: Callable[[torch.Tensor, PackedBatch], torch.Tensor]
) -> list[torch.Tensor]:
    """`read(logits, packed)` of each micro-batch, in order, without gradients and without dropout.

    `logits` [N, V / tp] are those of `packed.scored_rows`.
    """

    def use(packed: PackedBatch, logits: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
        return read(logits, packed)

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return _run(model, batches, use, whole=False, forward_only=True)
    finally:
        model.train(training)


def forward_backward(
    model: torch.nn.Module, batches: Sequence[PackedBatch], loss: LossFunction, *, whole: bool
) -> list[dict[str, torch.Tensor]]:
    """Leave the step's gradient, summed over micro-batches and data-parallel ranks, in the gradient buffers.

    The loss gets the logits of all positions when `whole`, else those of `packed.scored_rows`. Returns the metric sums of each
    micro-batch of this rank. Collective over all ranks.
    """

    def use(packed: PackedBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        value, sums = loss(logits, packed)
        return value, torch.ones((), dtype=torch.int), sums

    model.train()
    return _run(model, batches, use, whole=whole, forward_only=False)


def sum_metrics(parts: Sequence[dict[str, torch.Tensor]], group: dist.ProcessGroup) -> dict[str, float]:
    """Add the micro-batches' sums up over the data-parallel `group`: the step's means. Names must agree on all ranks."""
    names = list(parts[0])
    sums = torch.stack([torch.stack([part[name].double() for name in names]) for part in parts]).sum(0)
    dist.all_reduce(sums, group=group)
    return dict(zip(names, sums.tolist(), strict=True))
