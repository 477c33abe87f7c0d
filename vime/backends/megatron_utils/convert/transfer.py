"""Weights between a Hugging Face folder and a built Megatron model, one parameter at a time, in any parallel layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from vime.backends.megatron_utils.convert.folder import HFFolder
from vime.backends.megatron_utils.convert.ops import Op
from vime.backends.megatron_utils.convert.shape import ModelShape
from vime.errors import CheckpointError

__all__ = ["HFWeights", "Ranks", "check_hf_weights", "load_hf_weights", "parameters_by_name"]

TRANSFORMER_ENGINE_NAMES = (  # the local spec's name, and where Transformer Engine fuses the norm into the next layer
    (".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight"),
    (".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight"),
    (".self_attention.q_layernorm.weight", ".self_attention.linear_q_up_proj.layer_norm_weight"),
    (".self_attention.kv_layernorm.weight", ".self_attention.linear_kv_up_proj.layer_norm_weight"),
    (".input_layernorm.weight", ".self_attention.in_proj.layer_norm_weight"),
)
GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.weight(\d+)$")  # one grouped product for all experts of a rank
LAYER = re.compile(r"^(?:decoder\.layers\.\d+|mtp\.layers\.\d+\.mtp_model_layer)\.")
LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Chunks = Sequence[torch.nn.Module]
Read = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Which shard of a parameter this process holds."""

    tensor: int = 0
    tensor_size: int = 1
    expert_tensor: int = 0
    expert_tensor_size: int = 1

    @classmethod
    def here(cls) -> Ranks:
        """This process's, once Megatron's parallel groups are there."""
        from megatron.core import parallel_state

        return cls(
            tensor=parallel_state.get_tensor_model_parallel_rank(),
            tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
            expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
            expert_tensor_size=parallel_state.get_expert_tensor_parallel_world_size(),
        )

    def of(self, op: Op) -> tuple[int, int]:
        """(which, of how many)."""
        return (self.expert_tensor, self.expert_tensor_size) if op.is_expert else (self.tensor, self.tensor_size)


def parameters_by_name(chunks: Chunks) -> dict[str, torch.Tensor]:
    """The weights of a rank's model chunks under the local spec's names, whichever spec they were built with.

    Layers and experts are numbered over the whole model, whatever pipeline stage and expert-parallel rank this is.
    """
    out: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        biases = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".router.expert_bias"))
        for name, parameter in (*chunk.named_parameters(), *biases):
            out[_global_name(chunk, name)] = parameter
    return out


def _global_name(chunk: torch.nn.Module, name: str) -> str:
    for local, fused in TRANSFORMER_ENGINE_NAMES:
        name = name.replace(fused, local)
    name = GROUPED.sub(r".experts.local_experts.\2.\1.weight", name)
    if (found := LAYER.match(name)) is None:
        return name
    layer = chunk.get_submodule(found.group(0)[:-1])
    if (expert := LOCAL_EXPERT.search(name)) is not None:
        number = layer.mlp.local_expert_indices[int(expert.group(1))]  # type: ignore[union-attr, index]
        name = f"{name[: expert.start()]}.local_experts.{number}.{name[expert.end() :]}"
    if name.startswith("mtp."):  # all of these are in one stage
        return name
    return f"decoder.layers.{layer.layer_number - 1}.{name[found.end() :]}"  # type: ignore[operator]


def check_hf_weights(folder: str | Path, ops: Sequence[Op], shape: ModelShape) -> None:
    """Check by the files' headers alone that a folder holds exactly the model's tensors. Raises CheckpointError."""
    with HFFolder(folder) as source:
        known = [name for op in ops for name in op.hf] + (["lm_head.weight"] if shape.tied else [])
        source.check_no_others([*known, *shape.copies, *source.names_under(shape.carried)])
        for copy, original in shape.copies.items():
            if copy in source.names and not source.equal(copy, original):
                raise CheckpointError(
                    f"{folder}: '{copy}' differs from '{original}'. Trained, the two are one: leave --enable-mtp-training out."
                )
        for op in ops:
            for name, size in zip(op.hf, op.hf_shapes, strict=True):
                source.check(name, size)


def _own_parameters(parameters: Mapping[str, torch.Tensor], ops: Sequence[Op]) -> list[list[torch.Tensor]]:
    """For each op the parameters that it fills here: none where another rank holds it, two where a stage ties a copy of the embedding."""
    known = {op.megatron for op in ops}
    tied = "output_layer.weight" in parameters and "output_layer.weight" not in known
    unknown = sorted(set(parameters) - known - ({"output_layer.weight"} if tied else set()))
    if unknown:
        raise CheckpointError(f"the model has parameters that the op list of its family does not fill: {', '.join(unknown[:10])}.")
    out = []
    for op in ops:
        names = [op.megatron] + (["output_layer.weight"] if tied and op.megatron == "embedding.word_embeddings.weight" else [])
        out.append([parameters[name] for name in names if name in parameters])
    return out


@torch.no_grad()
def load_hf_weights(chunks: Chunks, folder: str | Path, ops: Sequence[Op], shape: ModelShape, *, ranks: Ranks) -> None:
    """Fill this rank's part of the model from a folder; only the tensors that it needs are read.

    Raises CheckpointError for a torn folder, and for weights that do not fill the model exactly.
    """
    own = _own_parameters(parameters_by_name(chunks), ops)
    check_hf_weights(folder, ops, shape)
    with HFFolder(folder) as source:
        for op, parameters in zip(ops, own, strict=True):
            if parameters:
                whole = op.fuse([source.tensor(name, size) for name, size in zip(op.hf, op.hf_shapes, strict=True)])
                for parameter in parameters:
                    parameter.copy_(op.shard(whole, *ranks.of(op)))


class HFWeights:
    """The weights of a built model under Hugging Face names, gathered from all ranks. Building it is collective.

    Which rank holds what is settled once, here; the values are read anew each time.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], ops: Sequence[Op], ranks: Ranks) -> None:
        """`parameters` are those of this rank that `ops` name (`parameters_by_name`)."""
        self._ops, self._ranks = ops, ranks
        self._own = [found[0] if found else None for found in _own_parameters(parameters, ops)]
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._rank = 0 if alone else dist.get_rank()
        self._device = next(p.device for p in self._own if p is not None)
        self.change: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, own: own  # (Megatron's name, this rank's part) -> what is sent
        row = [ranks.tensor, ranks.expert_tensor, *(0 if p is None else DTYPES.index(p.dtype) + 1 for p in self._own)]
        mine = torch.tensor(row, dtype=torch.int32, device=self._device)
        rows = [mine]
        if not alone:
            rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, mine)
        self._table = torch.stack(rows).cpu()
        self._shapes: dict[tuple[object, ...], tuple[int, ...]] = {}
        for number, op in enumerate(ops):
            if not self._table[:, 2 + number].any():
                raise CheckpointError(
                    f"no rank holds the parameter '{op.megatron}': the model was built of other layers than its family's."
                )

    @torch.no_grad()
    def buckets(
        self, bucket_bytes: int, read: Read | None = None, *, without: str | None = None
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """(name, tensor) pairs in buckets of about `bucket_bytes`, without vocabulary padding.

        With `read` not the parameters but what it makes of each, a float32 tensor of its shape: its gradient, say. `without`: what the
        Megatron names begin with of parameters that are left out.

        Collective: every rank must exhaust it, and all see the same number of buckets. Rank 0 gets the tensors (copies), the
        others get empty lists; of equal replicas the one with the lowest rank sends.
        """
        bucket: list[tuple[str, torch.Tensor]] = []
        filled = 0
        for number, op in enumerate(self._ops):
            if without is not None and op.megatron.startswith(without):
                continue
            whole = self._gather(number, op, read)
            if whole is not None:
                bucket += [(name, part.contiguous()) for name, part in zip(op.hf, op.split(whole), strict=True)]
            filled += op.num_elements * self._dtype(number).itemsize
            if filled >= bucket_bytes:
                yield bucket
                bucket, filled = [], 0
        if filled:
            yield bucket

    def _dtype(self, number: int) -> torch.dtype:
        return DTYPES[int(self._table[:, 2 + number].max()) - 1]

    def _gather(self, number: int, op: Op, read: Read | None) -> torch.Tensor | None:
        """The whole Megatron parameter of op `number` on rank 0; None elsewhere."""
        size = self._ranks.of(op)[1] if op.is_sharded else 1
        held = self._table[:, 2 + number] > 0
        shards = []
        for shard in range(size):
            holders = held & (self._table[:, int(op.is_expert)] == shard) if op.is_sharded else held
            source = int(holders.nonzero()[0])
            if source == self._rank:
                own = self._own[number]
                assert own is not None
                sent = self.change(op.megatron, own.detach()) if read is None else read(own).float()
                if self._rank == 0:
                    shards.append(sent.clone() if sent.data_ptr() == own.data_ptr() else sent)
                else:
                    dist.send(sent.contiguous(), 0)
            elif self._rank == 0:
                dtype = self._dtype(number) if read is None else torch.float32
                buffer = torch.empty(self._shape(op, size), dtype=dtype, device=self._device)
                dist.recv(buffer, source)
                shards.append(buffer)
        if self._rank != 0:
            return None
        return op.merge(shards) if size > 1 else shards[0]

    def _shape(self, op: Op, size: int) -> tuple[int, ...]:
        key = (replace(op, megatron="", hf=()), size)
        if key not in self._shapes:
            self._shapes[key] = op.shard_shape(size)
        return self._shapes[key]
