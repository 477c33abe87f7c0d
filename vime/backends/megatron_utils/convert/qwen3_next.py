"""Qwen3-Next: gated delta nets in most layers, gated attention in the others, a mixture of experts with a shared one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vime.backends.megatron_utils.convert.decoder import decoder_ops, delta_rest
from vime.backends.megatron_utils.convert.family import Family
from vime.backends.megatron_utils.convert.fields import Fields
from vime.backends.megatron_utils.convert.ops import Op, Sections
from vime.backends.megatron_utils.convert.shape import DeltaShape, ModelShape, hybrid_shape, qwen_prediction, softmax_experts

__all__ = ["FAMILY"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ByKeyHead(Sections):
    """The input projection of a gated delta net, whose two tensors hold head of keys after head of keys:
    query, key, values and their gates; and b and a of the values."""

    keys: int

    def fuse(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        query, value, count = self.sections[0] // self.keys, self.sections[2] // self.keys, self.sections[4] // self.keys
        by_head = [part.unflatten(0, (self.keys, -1)) for part in parts]
        pieces = (*by_head[0].split([query, query, value, value], dim=1), *by_head[1].split([count, count], dim=1))
        return torch.cat([piece.flatten(0, 1) for piece in pieces])

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        pieces = [piece.unflatten(0, (self.keys, -1)) for piece in whole.split(list(self.sections))]
        return [torch.cat(pieces[:4], dim=1).flatten(0, 1), torch.cat(pieces[4:], dim=1).flatten(0, 1)]


def _delta_ops(delta: DeltaShape, hidden: int, ours: str, theirs: str) -> list[Op]:
    key, value = delta.num_keys * delta.key_dim, delta.num_values * delta.value_dim
    project = _ByKeyHead(
        megatron=f"{ours}in_proj.weight",
        hf=(f"{theirs}in_proj_qkvz.weight", f"{theirs}in_proj_ba.weight"),
        hf_shapes=((2 * key + 2 * value, hidden), (2 * delta.num_values, hidden)),
        sections=(key, key, value, value, delta.num_values, delta.num_values),
        keys=delta.num_keys,
    )
    return [project, *delta_rest(delta, hidden, ours, theirs)]


def _shape(fields: Fields) -> ModelShape:
    shape = replace(hybrid_shape(fields), carried=("mtp.",), prediction=qwen_prediction(1))
    return replace(shape, experts=softmax_experts(fields, shared=True, normalised=True))


def _ops(shape: ModelShape, padded_vocab_size: int) -> list[Op]:
    return decoder_ops(shape, padded_vocab_size, delta=_delta_ops)


FAMILY = Family(architecture="Qwen3NextForCausalLM", shape=_shape, ops=_ops)
