"""Low-rank adapters (LoRA, arXiv:2106.09685) on Megatron's column- and row-parallel linear layers; all other weights are frozen.

    h = W x + alpha / rank * B A x    (section 4.1, eq. 3)    A uniform in +-1 / sqrt(in), as in PEFT; B = 0

The narrow product A x is what travels between tensor-parallel ranks: gathered with sequence parallelism, summed in row-parallel
layers. An adapter's module stands beside its layer ("linear_qkv_adapter") and adds to its output.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn.functional import dropout, linear

from vime.backends.megatron_utils.convert.ops import Op
from vime.backends.megatron_utils.convert.transfer import HFWeights, Ranks, parameters_by_name
from vime.backends.megatron_utils.layer_probe import has_transformer_engine
from vime.backends.megatron_utils.lora_ops import FACTOR_A, AdapterOps, AdapterSettings, adapter_ops, is_adapter
from vime.errors import ConfigError

__all__ = ["Adapters", "attach_adapters"]


class Adapter(torch.nn.Module):
    """What is added to the output of one layer, `layer`, that is a ColumnParallelLinear or a RowParallelLinear of Megatron's.

    Layers of experts leave the exchange of tokens between ranks to their dispatcher; there the gradient of the factor that ranks hold
    alike is summed.
    """

    def __init__(self, layer: Any, ops: AdapterOps, settings: AdapterSettings, ranks: Ranks) -> None:
        super().__init__()
        self._row, self._group = ops.is_row_parallel, layer.tp_group
        self._explicit = layer.explicit_expert_comm
        self._sequence = layer.sequence_parallel and not self._explicit
        self._scale, self._dropout = settings.scale, settings.dropout
        self._cuts = ops.cuts(ranks)
        self.enabled = True
        weight: torch.Tensor = layer.weight
        like = {"dtype": weight.dtype, "device": weight.device}
        self._members = ops.membership(ranks).to(**like)  # type: ignore[call-overload]
        rows, inner = len(weight), weight.shape[1]
        if self._members.shape[0] != rows:
            raise ConfigError(f"--lora-rank: {ops.base.megatron} has {rows} rows on this rank and its op list says {len(self._members)}.")
        self.a = torch.nn.Parameter(torch.empty(len(ops.parts) * settings.rank, inner, **like))  # type: ignore[arg-type]
        self.b = torch.nn.Parameter(torch.zeros(rows, settings.rank, **like))  # type: ignore[arg-type]
        cut, alike = (self.a, self.b) if self._row else (self.b, self.a)
        set_tensor_model_parallel_attributes(cut, True, 1 if self._row else 0, 1)
        alike.sequence_parallel = self._sequence  # type: ignore[attr-defined]  # each rank sees its part of the tokens
        for factor in (self.a, self.b):
            factor.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`out`, the layer's own output for x [T, ..., in of this rank], with the adapter's added, in one pass over memory."""
        if self._dropout and self.training:
            with self._generator():
                x = dropout(x, self._dropout)
        a, b = self.a, self.b if self._row else self._spread()
        if self._explicit:
            a, b = (a, self._copied(b)) if self._row else (self._copied(a), b)
        inner = linear(x, a) * self._scale
        if not self._explicit:
            inner = self._exchanged(inner)
        return torch.addmm(out.flatten(0, -2), inner.flatten(0, -2), b.t()).view(out.shape)

    def add(self, layer: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any] | None:
        """A forward hook of the layer."""
        return (self(inputs[0], output[0]), output[1]) if self.enabled else None

    @torch.no_grad()
    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` (this rank's part of the layer's) + scale B A, computed in float32, in the weight's dtype. `weight` stays as it is."""
        if not self.b.any():
            return weight  # to the bit: -0.0 + 0.0 would be another
        b = self.b.float() if self._row else self._spread().float()
        return torch.addmm(weight.float(), b, self.a.float(), alpha=self._scale).to(weight.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For Megatron's checkpoints: rows that are apart in the whole B have keys of their own, so that any layout reads them."""
        assert metadata is not None
        axes = {"a": 1} if self._row else {"b": 0}
        groups = {"tp_group": self._group, "dp_cp_group": metadata["dp_cp_group"]}
        found = make_sharded_tensors_for_checkpoint({"a": self.a, "b": self.b}, prefix, axes, sharded_offsets, **groups)
        if len(self._cuts) > 1:
            found[f"{prefix}b"] = self._in_pieces(found[f"{prefix}b"], sharded_offsets)
        return found

    def _spread(self) -> torch.Tensor:
        """[out, parts x rank]: each row's factors in the columns of its own part, and 0 in the others."""
        return self.b if self._members.shape[1] == 1 else (self._members[:, :, None] * self.b[:, None]).flatten(1)

    def _copied(self, factor: torch.Tensor) -> torch.Tensor:
        return copy_to_tensor_model_parallel_region(factor, group=self._group)

    def _exchanged(self, inner: torch.Tensor) -> torch.Tensor:
        """A x of all tokens and all inputs that this rank's rows need."""
        if self._row:
            if self._sequence:
                return reduce_scatter_to_sequence_parallel_region(inner, group=self._group)
            return reduce_from_tensor_model_parallel_region(inner, group=self._group)
        return gather_from_sequence_parallel_region(inner, group=self._group) if self._sequence else self._copied(inner)

    def _generator(self) -> AbstractContextManager[None]:
        """Ranks with the same input drop the same of it; ranks with parts of it have generators of their own."""
        same = not (self._row or self._sequence or self._explicit)
        return nullcontext() if same else get_cuda_rng_tracker().fork()

    def _in_pieces(self, whole: ShardedTensor, offsets: tuple[Any, ...]) -> ShardedTensorFactory:
        axis, cuts = len(offsets), self._cuts
        rank, size = self._group.rank(), self._group.size()

        def build(key: str, data: torch.Tensor, replica: ReplicaId, flattened: slice | None) -> list[ShardedTensor]:
            at = (axis, rank, size)
            return [
                ShardedTensor.from_rank_offsets(f"{key}.{i}", piece, *offsets, at, replica_id=replica, prepend_axis_num=axis)
                for i, piece in enumerate(data.split(cuts))
            ]

        return ShardedTensorFactory(whole.key, whole.data, build, torch.cat, whole.replica_id)


class Adapters:
    """All adapters of this rank's model chunks. Building it is collective."""

    def __init__(
        self, settings: AdapterSettings, found: Sequence[AdapterOps], modules: Mapping[str, Adapter], chunks: Sequence[Any]
    ) -> None:
        self.settings = settings
        self.found = list(found)
        self.names = {name for one in found for name in (*one.a.hf, *one.b_names)}  # Hugging Face names of the factors
        self._modules = dict(modules)  # by the Megatron name of the layer's weight
        self._parameters = {name: p for name, p in parameters_by_name(chunks).items() if is_adapter(name)}

    def weights(self, ranks: Ranks) -> HFWeights:
        """The factors under PEFT's names, without its prefix, gathered from all ranks. Collective."""
        return HFWeights(self._parameters, [op for one in self.found for op in (one.a, one.b)], ranks)

    @torch.no_grad()
    def fill(self, read: Callable[[str, tuple[int, ...]], torch.Tensor | None], ranks: Ranks) -> None:
        """Take this rank's factors from `read(Hugging Face name, shape)`; 0 where it gives none."""
        for one in self.found:
            for op in (one.a, one.b):
                if op.megatron in self._parameters:
                    read_parts = [(read(name, shape), shape) for name, shape in zip(op.hf, op.hf_shapes, strict=True)]
                    whole = op.fuse([torch.zeros(shape) if part is None else part for part, shape in read_parts])
                    self._parameters[op.megatron].copy_(op.shard(whole, *ranks.of(op)))

    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """This rank's part of the parameter `name` (Megatron's) with its adapter; without one as it is."""
        return self._modules[name].merged(weight) if name in self._modules else weight

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is the base model."""
        for module in self._modules.values():
            module.enabled = False
        try:
            yield
        finally:
            for module in self._modules.values():
                module.enabled = True


def attach_adapters(
    chunks: Sequence[torch.nn.Module], ops: Sequence[Op], settings: AdapterSettings, ranks: Ranks, *, seed: int
) -> Adapters:
    """Freeze the model that was built and filled, and put adapters beside its layers. Before it is wrapped for data parallelism.

    The same `seed` gives the same adapters at any layout. Raises ConfigError for targets that the model does not have, and where a
    pipeline stage would have nothing to train.
    """
    if has_transformer_engine():
        raise ConfigError("--lora-rank: Transformer Engine's layers take no adapters yet. Uninstall it, or train all weights.")
    found = adapter_ops(ops, rank=settings.rank, targets=settings.targets)
    layers: dict[int, tuple[torch.nn.Module, str]] = {}
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.requires_grad_(False)
        for module in chunk.modules():
            if hasattr(module, "frozen_expert_bias"):
                module.frozen_expert_bias = True  # type: ignore[assignment]  # Megatron would move a router's bias
        layers |= {id(module.weight): (chunk, name) for name, module in chunk.named_modules() if hasattr(module, "explicit_expert_comm")}
    base = parameters_by_name(chunks)
    modules: dict[str, Adapter] = {}
    for one in found:
        weight = base.get(one.base.megatron)
        if weight is None:
            continue  # another rank's
        if id(weight) not in layers:
            raise ConfigError(f"--lora-rank: {one.base.megatron} is in no ColumnParallelLinear or RowParallelLinear of Megatron's.")
        chunk, name = layers[id(weight)]
        parent, _, child = name.rpartition(".")
        layer: Any = chunk.get_submodule(name)
        adapter = Adapter(layer, one, settings, ranks)
        chunk.get_submodule(parent).add_module(f"{child}_adapter", adapter)
        layer.register_forward_hook(adapter.add)
        modules[one.base.megatron] = adapter
    if not modules:
        raise ConfigError(
            f"none of the layers {', '.join(settings.targets)} is in this pipeline stage, which so has nothing to train: "
            "name more --lora-target-modules, or lower --pipeline-model-parallel-size."
        )
    adapters = Adapters(settings, found, modules, chunks)
    adapters.fill(lambda name, shape: _start(name, shape, seed) if name.endswith(FACTOR_A) else None, ranks)
    return adapters


def _start(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A's start, [rank, in], that depends on the layer and the seed alone."""
    generator = torch.Generator().manual_seed((seed << 32) + zlib.crc32(name.encode()))
    return (torch.rand(shape, generator=generator) * 2 - 1) / shape[1] ** 0.5
