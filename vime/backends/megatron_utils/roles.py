"""Weights of other roles (reference, teacher, ...) beside the policy's: one model, several sets of weights.

A set waits in host memory. While it is needed it changes places with the weights in the model, tensor by tensor: no second model, and
never more than one tensor twice. The policy comes back bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from vime.errors import DataError
from vime.packing.pack import PackedBatch

__all__ = ["HeldWeights", "SentVersions"]


class HeldWeights:
    """Sets of weights by role, for the model whose chunks are `modules`: of all its parameters, or of those whose name `chosen` takes."""

    def __init__(self, modules: Sequence[torch.nn.Module], chosen: Callable[[str], bool] = lambda name: True) -> None:
        self._modules, self._chosen = list(modules), chosen
        self._held: dict[str, list[torch.Tensor]] = {}

    def __contains__(self, role: str) -> bool:
        return role in self._held

    @torch.no_grad()
    def keep(self, role: str) -> None:
        """Hold a copy of what is in the model now as `role`."""
        self._held[role] = [_host(tensor) for tensor in self._tensors()]

    def drop(self, role: str) -> None:
        """Forget `role`."""
        del self._held[role]

    @contextmanager
    def using(self, role: str) -> Iterator[None]:
        """The model has the weights of `role` inside; what it had comes back afterwards, and changes to `role` are kept."""
        self._exchange(role)
        try:
            yield
        finally:
            self._exchange(role)

    @torch.no_grad()
    def _exchange(self, role: str) -> None:
        for held, tensor in zip(self._held[role], self._tensors(), strict=True):
            mine = tensor.clone()
            tensor.copy_(held)
            held.copy_(mine)

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Parameters, and the buffers that training changes (a router's expert bias)."""
        for module in self._modules:
            yield from (parameter for name, parameter in module.named_parameters() if self._chosen(name))
            yield from (buffer for name, buffer in module.named_buffers() if self._chosen(name))


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, page-locked where a device copies from it."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach())


class SentVersions:
    """The weights of the last versions that were sent to the engines: the old policy of data that is older than the policy.

    `held` keeps them: `count`, one more than data may be versions behind. Two are slime's rollout_actor and old_actor.
    """

    def __init__(self, held: HeldWeights, *, count: int = 2) -> None:
        self._held, self._count = held, count
        self._versions: list[int] = []

    def keep(self, version: int) -> None:
        """Hold what is in the model now as `version`."""
        self._versions = [v for v in self._versions if v != version] + [version]
        self._held.keep(_role(version))
        for old in self._versions[: -self._count]:
            self._held.drop(_role(old))
        self._versions = self._versions[-self._count :]

    def old_log_probs(
        self,
        plans: Sequence[Sequence[PackedBatch]],
        compute: Callable[[], Sequence[Sequence[PackedBatch]]],
        any_rank: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[list[PackedBatch]]:
        """`plans` with each token's log-prob under the weights that sampled it, as `old_log_probs`; the engine's own where those are gone.

        `compute` gives `plans` with `old_log_probs` under what is in the model; before the last pipeline stage without. `any_rank`
        makes a tensor of flags the maximum over all ranks. Raises DataError when a trained token has neither.
        """
        flat = [packed for step in plans for packed in step]
        mine = [any(bool((_versions(p)[p.loss_mask > 0] == version).any()) for p in flat) for version in self._versions]
        needed = any_rank(torch.tensor(mine, dtype=torch.int64)).tolist()
        out = [_engines(packed) for packed in flat]
        for version, wanted in zip(self._versions, needed, strict=True):
            if wanted:
                with self._held.using(_role(version)):
                    found = [packed.old_log_probs for step in compute() for packed in step]
                pairs = zip(flat, out, found, strict=True)
                out = [old if new is None else torch.where(_versions(packed) == version, new, old) for packed, old, new in pairs]
        for packed, values in zip(flat, out, strict=True):
            _check_all_known(packed, values, self._versions)
        merged = iter(packed.with_token_values(old_log_probs=values) for packed, values in zip(flat, out, strict=True))
        return [[next(merged) for _ in step] for step in plans]


def _role(version: int) -> str:
    return f"version {version}"


def _versions(packed: PackedBatch) -> torch.Tensor:
    """[T]: the weight version of each token; -1 where none is known."""
    return torch.full_like(packed.loss_mask, -1) if packed.weight_versions is None else packed.weight_versions


def _engines(packed: PackedBatch) -> torch.Tensor:
    """[T]: what the engine said; NaN where it said nothing."""
    return torch.full_like(packed.loss_mask, torch.nan) if packed.rollout_log_probs is None else packed.rollout_log_probs


def _check_all_known(packed: PackedBatch, values: torch.Tensor, held: list[int]) -> None:
    if torch.isnan(values[packed.loss_mask > 0]).any():
        found = sorted(set(_versions(packed)[packed.loss_mask > 0].int().tolist()))
        raise DataError(
            f"--keep-old-actor holds the weight versions {held}, and samples {list(packed.sample_ids)[:4]}... have tokens of {found} "
            "without the engine's log-probs: set Sample.weight_versions, or Sample.rollout_log_probs."
        )
