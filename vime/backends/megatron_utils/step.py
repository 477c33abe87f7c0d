"""Passes over micro-batches with Megatron's schedule: log-probs without gradients, and one optimizer step's gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from vime.backends.megatron_utils.experts import share_of_losses
from vime.backends.megatron_utils.measures import positions_here
from vime.backends.megatron_utils.model import forward_logits
from vime.packing.pack import PackedBatch

__all__ = ["LossFunction", "ReadFunction", "forward_backward", "forward_each", "from_last_stage", "sum_metrics"]

# (logits [N, V / tp], packed, the places of these rows [N] or None for all) -> (loss, metric sums)
LossFunction = Callable[[torch.Tensor, PackedBatch, torch.Tensor | None], tuple[torch.Tensor, dict[str, torch.Tensor]]]
ReadFunction = Callable[[torch.Tensor, PackedBatch, torch.Tensor | None], torch.Tensor]


def _forward_step(
    use: Callable[..., Any], whole: bool, batches: Iterator[PackedBatch], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[..., Any]]:
    packed = next(batches)
    tape = getattr(model.config, "routing_tape", None)
    if tape is not None:
        tape.start(packed, positions_here(packed, sequence_parallel=model.config.sequence_parallel) if tape.of_engine else None)
    output, rows = forward_logits(model, packed, None if whole else packed.scored_rows)
    return output, partial(use, packed, rows)


def _run(
    chunks: Sequence[torch.nn.Module], batches: Sequence[PackedBatch], use: Callable[..., Any], *, whole: bool, forward_only: bool
) -> list[Any]:
    config: Any = chunks[0].config
    wanted = len(batches)
    if config.num_moe_experts is not None:
        share_of_losses(config, batches)
    if len(chunks) > 1:  # the interleaved schedule wants whole rounds of the pipeline
        size = max(2, config.tensor_model_parallel_size if config.sequence_parallel else 1)  # of which each rank takes a share
        batches = [*batches, *[batches[-1].emptied(size)] * (-wanted % config.pipeline_model_parallel_size)]
    longest = max(packed.num_tokens for packed in batches)
    results = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, use, whole),
        data_iterator=iter(batches) if len(chunks) == 1 else [iter(batches) for _ in chunks],
        model=chunks[0] if len(chunks) == 1 else list(chunks),
        num_microbatches=len(batches),
        seq_length=longest,
        micro_batch_size=1,
        decoder_seq_length=longest,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return list(results[:wanted])


def forward_each(chunks: Sequence[torch.nn.Module], batches: Sequence[PackedBatch], read: ReadFunction) -> list[torch.Tensor]:
    """`read(logits, packed, rows)` of each micro-batch, in order, without gradients and without dropout.

    `logits` [N, V / tp] are those of this rank's share `rows` of `packed.scored_rows`. Empty on all pipeline stages but the last.
    """

    def use(packed: PackedBatch, rows: torch.Tensor | None, logits: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
        return read(logits, packed, rows)

    training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            return _run(chunks, batches, use, whole=False, forward_only=True)
    finally:
        for chunk, mode in zip(chunks, training, strict=True):
            chunk.train(mode)


def forward_backward(
    chunks: Sequence[torch.nn.Module], batches: Sequence[PackedBatch], loss: LossFunction, *, whole: bool
) -> list[dict[str, torch.Tensor]]:
    """Leave the step's gradient, summed over micro-batches and data-parallel ranks, in the gradient buffers.

    The loss gets the logits of all positions when `whole`, else those of `packed.scored_rows`. Returns the metric sums of each
    micro-batch of this rank; none on pipeline stages before the last. Collective over all ranks.
    """

    def use(
        packed: PackedBatch, rows: torch.Tensor | None, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        value, sums = loss(logits, packed, rows)
        return value, torch.ones((), dtype=torch.int), sums

    for chunk in chunks:
        chunk.train()
    return _run(chunks, batches, use, whole=whole, forward_only=False)


def sum_metrics(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Add the micro-batches' sums up over the data-parallel ranks: the step's means, the same on all ranks.

    `parts` are what `forward_backward` gave; their names must agree on all ranks of the last pipeline stage.
    """
    found: list[dict[str, float]] = [{}]
    if parts:
        names = list(parts[0])
        sums = torch.stack([torch.stack([part[name].double() for name in names]) for part in parts]).sum(0)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        found = [dict(zip(names, sums.tolist(), strict=True))]
    return from_last_stage(found)[0]


def from_last_stage(values: list[Any]) -> list[Any]:
    """`values` of the last pipeline stage, on all of them; each stage gives a list of as many, whatever is in it. Collective."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(values, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return values
