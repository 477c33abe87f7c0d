"""Which linear layers get low-rank adapters, and how an adapter's two factors lie in Megatron's layers and in a PEFT folder.

A Megatron layer may hold several Hugging Face layers (q, k and v; gate and up), each with an adapter of its own:

    A   their factors [rank, in], one under another; cut along `in` in row-parallel layers, else whole on each rank
    B   [out, rank], its rows in the order of the fused weight's and cut as they are; whole in row-parallel layers
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from vime.backends.megatron_utils.convert.ops import Copy, GateUp, Op, Sections, Shard, Vocabulary
from vime.backends.megatron_utils.convert.transfer import Ranks
from vime.errors import ConfigError

__all__ = ["FACTOR_A", "FACTOR_B", "WEIGHT", "AdapterOps", "AdapterSettings", "adapter_ops", "is_adapter", "layer_name", "target_names"]

WEIGHT, ADAPTER = ".weight", "_adapter."
FACTOR_A, FACTOR_B = ".lora_A.weight", ".lora_B.weight"  # PEFT's names


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stacked(Op):
    """Tensors one under another, whole on every rank."""

    def fuse(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(whole.split([shape[0] for shape in self.hf_shapes]))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """What a run's adapters are."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]  # Hugging Face names of the layers, sorted

    @property
    def scale(self) -> float:
        """The factor of B A x."""
        return self.alpha / self.rank

    def as_saved(self, base: str) -> dict[str, Any]:
        """What a checkpoint of adapters says of itself; `base` is the digest of the weights that they stand on."""
        return {**{key: value for key, value in asdict(self).items() if key != "dropout"}, "targets": list(self.targets), "base": base}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOps:
    """The adapter of one Megatron layer."""

    base: Op  # of the layer's weight
    a: Op
    b: Op
    parts: tuple[int, ...]  # which of `base.hf` have an adapter; rows of B that belong to others stay 0

    @property
    def is_row_parallel(self) -> bool:
        """The layer's input is cut over the tensor-parallel ranks, not its output."""
        return isinstance(self.base, Shard) and self.base.dim == 1

    @property
    def module(self) -> str:
        """Megatron's name of the adapter's module, without the dot at its end."""
        return self.base.megatron.removesuffix(WEIGHT) + ADAPTER[:-1]

    @property
    def b_names(self) -> list[str]:
        """The Hugging Face names of those B that there are."""
        return [self.b.hf[i] for i in self.parts]

    def cuts(self, ranks: Ranks) -> list[int]:
        """Rows of this rank's B that stand next to one another in the whole B, too."""
        size = ranks.of(self.b)[1]
        if isinstance(self.b, GateUp):
            return [shape[0] // size for shape in self.b.hf_shapes]
        if isinstance(self.b, Sections):
            return [rows // size for rows in self.b.sections]
        return [self.b.shard_shape(size)[0]]

    def membership(self, ranks: Ranks) -> torch.Tensor:
        """[rows of this rank's B, adapted parts]: 1 where a row is the part's, else 0."""
        marks = [torch.full((shape[0], 1), i) for i, shape in enumerate(self.b.hf_shapes)]
        mine = self.b.shard(self.b.fuse(marks), *ranks.of(self.b))
        return (mine == torch.tensor(self.parts)).float()


def is_adapter(name: str) -> bool:
    """Whether a Megatron parameter of this name is an adapter's."""
    return ADAPTER in name


def layer_name(hf: str) -> str:
    """The layer's name as a target: "q_proj" of "model.layers.0.self_attn.q_proj.weight"."""
    return hf.removesuffix(WEIGHT).rpartition(".")[2]


def _is_linear(op: Op) -> bool:
    """A column- or row-parallel layer's weight."""
    return op.is_sharded and not isinstance(op, Vocabulary) and op.megatron.endswith(WEIGHT) and all(len(s) == 2 for s in op.hf_shapes)


def target_names(ops: Iterable[Op]) -> list[str]:
    """The names of the layers that can have adapters, sorted."""
    return sorted({layer_name(name) for op in ops if _is_linear(op) for name in op.hf})


def adapter_ops(ops: Sequence[Op], *, rank: int, targets: Sequence[str]) -> list[AdapterOps]:
    """The adapters of a model by its op list; no `targets` = all linear layers.

    Raises ConfigError for a target that the model does not have.
    """
    known = target_names(ops)
    problems = []
    for target in targets:
        if target not in known:
            near = difflib.get_close_matches(target, known, 1, 0.5)
            meant = f"Did you mean {near[0]}? " if near else ""
            problems.append(f"--lora-target-modules {target}: the model has no such linear layer. {meant}It has {', '.join(known)}.")
    if problems:
        raise ConfigError(*problems)
    wanted = set(targets or known)
    found = []
    for op in ops:
        parts = tuple(i for i, name in enumerate(op.hf) if layer_name(name) in wanted) if _is_linear(op) else ()
        if parts:
            found.append(_of(op, parts, rank))
    return found


def _of(op: Op, parts: tuple[int, ...], rank: int) -> AdapterOps:
    module = op.megatron.removesuffix(WEIGHT) + ADAPTER
    names = [name.removesuffix(WEIGHT) for name in op.hf]
    a_names, a_shapes = tuple(names[i] + FACTOR_A for i in parts), tuple((rank, op.hf_shapes[i][1]) for i in parts)
    b_names, b_shapes = tuple(name + FACTOR_B for name in names), tuple((shape[0], rank) for shape in op.hf_shapes)
    a: Op
    b: Op
    if isinstance(op, Shard) and op.dim == 1:
        a = Shard(megatron=module + "a", hf=a_names, hf_shapes=a_shapes, dim=1, is_expert=op.is_expert)
        b = Copy(megatron=module + "b", hf=b_names, hf_shapes=b_shapes, is_expert=op.is_expert)
    else:
        a = _Stacked(megatron=module + "a", hf=a_names, hf_shapes=a_shapes, is_expert=op.is_expert)
        b = replace(op, megatron=module + "b", hf=b_names, hf_shapes=b_shapes)
    return AdapterOps(base=op, a=a, b=b, parts=parts)
