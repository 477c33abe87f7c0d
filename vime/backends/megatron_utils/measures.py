"""What a record measures in a model: moments of its logits, its routers' choices, its gradients as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from vime.backends.megatron_utils.context_shard import context_shard
from vime.backends.megatron_utils.experts import Router
from vime.packing.pack import PackedBatch

__all__ = ["chosen_experts", "gather_gradients", "logit_moments", "main_grad", "positions_here", "routes_of"]

CHUNK_ELEMENTS = 2**20  # of logits that are summed up in float64 at a time


def logit_moments(logits: torch.Tensor, group: dist.ProcessGroup, vocab_size: int) -> torch.Tensor:
    """[2, N] f64: mean and mean square of each row of `logits` [N, V / tp] over the vocabulary without padding. Collective over `group`."""
    width = logits.shape[-1]
    valid = max(0, min(width, vocab_size - dist.get_rank(group) * width))
    sums = torch.zeros((2, len(logits)), dtype=torch.float64, device=logits.device)
    chunk = max(1, CHUNK_ELEMENTS // max(width, 1))
    for at in range(0, len(logits), chunk):
        part = logits[at : at + chunk, :valid].double()
        sums[0, at : at + chunk], sums[1, at : at + chunk] = part.sum(-1), part.square().sum(-1)
    dist.all_reduce(sums, group=group)
    return sums / vocab_size


@contextmanager
def routes_of(chunks: Sequence[torch.nn.Module]) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Layer -> [tokens here, experts] bool of each pass inside, in order; of the routers of this pipeline stage.

    Without those of layers for multi-token prediction, which run in training alone and are counted by themselves.
    """
    maps: dict[int, list[torch.Tensor]] = {}
    hooks = []
    for router in (module for chunk in chunks for module in chunk.modules() if isinstance(module, Router) and not module.is_mtp_layer):
        of_layer = maps.setdefault(router.layer_number, [])

        def keep(module: Any, inputs: Any, output: Any, into: list[torch.Tensor] = of_layer) -> None:
            into.append(output[1].detach())

        hooks.append(router.register_forward_hook(keep))
    try:
        yield maps
    finally:
        for hook in hooks:
            hook.remove()


def chosen_experts(routing_map: torch.Tensor) -> torch.Tensor:
    """[n, k] i16: the experts of each token in ascending order, from a map [n, experts]; a token without any has the first k."""
    k = int(routing_map.sum(-1).max()) if len(routing_map) else 0
    return routing_map.to(torch.int8).topk(k, dim=-1).indices.sort(-1).values.to(torch.int16)


def positions_here(packed: PackedBatch, *, sequence_parallel: bool) -> torch.Tensor:
    """[n] i64: the places in the pack of the tokens that this rank's routers see; T stands for padding."""
    size, tensor = parallel_state.get_context_parallel_world_size(), parallel_state.get_tensor_model_parallel_world_size()
    places = torch.arange(packed.num_tokens, device=packed.tokens.device)
    if size > 1:
        rank, multiple = parallel_state.get_context_parallel_rank(), tensor if sequence_parallel else 1
        places = context_shard(packed, rank=rank, size=size, multiple_of=multiple).at
    return places.chunk(tensor)[parallel_state.get_tensor_model_parallel_rank()] if sequence_parallel else places


def main_grad(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient as it was summed up; zeros where it is not trained."""
    found = getattr(parameter, "main_grad", None)
    return torch.zeros_like(parameter) if found is None or not parameter.requires_grad else found


def gather_gradients(chunks: Sequence[Any]) -> None:
    """Give each rank the whole gradient sums: the distributed optimizer left it its own share. Collective; that share stays as it is."""
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group()
    for chunk in chunks:
        for buffer, group in [(b, dense) for b in chunk.buffers] + [(b, experts) for b in chunk.expert_parallel_buffers]:
            for bucket in buffer.buckets:
                share = bucket.grad_data.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()
                dist.all_gather_into_tensor(bucket.grad_data, share, group=group)
