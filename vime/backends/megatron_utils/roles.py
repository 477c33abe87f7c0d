"""Weights of other roles (reference, teacher, ...) beside the policy's: one model, several sets of weights.

A set waits in host memory. While it is needed it changes places with the weights in the model, tensor by tensor: no second model, and
never more than one tensor twice. The policy comes back bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

__all__ = ["HeldWeights"]


class HeldWeights:
    """Sets of weights by role, for the model whose chunks are `modules`."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = list(modules)
        self._held: dict[str, list[torch.Tensor]] = {}

    def __contains__(self, role: str) -> bool:
        return role in self._held

    @torch.no_grad()
    def keep(self, role: str) -> None:
        """Hold a copy of what is in the model now as `role`."""
        self._held[role] = [_host(tensor) for tensor in self._tensors()]

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
        held = self._held[role]
        for i, tensor in enumerate(self._tensors()):
            mine = _host(tensor)
            tensor.copy_(held[i])
            held[i] = mine

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Parameters, and the buffers that training changes (a router's expert bias)."""
        for module in self._modules:
            yield from module.parameters()
            yield from module.buffers()


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, page-locked where a device copies from it."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach())
