"""The trainer's device memory given back while the engines work: weights, master weights, Adam's moments wait in page-locked memory.

Tensors stay the same objects: the memory behind them is freed and taken anew, so every view of it, of which Megatron's buffers
have many, comes back with it. Gradients are not kept: each step begins with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["Offload"]


class Offload:
    """What one trainer can give back of the memory of `device`. `model` are its wrapped chunks."""

    def __init__(self, model: Sequence[Any], optimizer: Any, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._gone: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}  # part -> (memory, bytes it had)
        self._host: dict[tuple[str, int], torch.Tensor] = {}  # copies by part and number; kept for the next time

    def give_back(self, *, weights: bool) -> None:
        """Give back gradients, master weights and moments, and the weights themselves where `weights`. A second call adds to the first."""
        for part in ("gradients", "state", *(["weights"] if weights else [])):
            if part not in self._gone:
                self._gone[part] = self._leave(part)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def take_back(self) -> None:
        """Have everything again; nothing is done when nothing is gone."""
        for part, left in self._gone.items():
            for number, (storage, size) in enumerate(left):
                storage.resize_(size)
                if part == "gradients":
                    _bytes_of(storage).zero_()
                else:
                    _bytes_of(storage).copy_(self._host[part, number], non_blocking=True)
        self._gone = {}
        self._synchronize()

    def _leave(self, part: str) -> list[tuple[torch.UntypedStorage, int]]:
        found = self._storages(part)
        for number, storage in enumerate(found if part != "gradients" else []):
            host = self._host.get((part, number))
            if host is None or len(host) != storage.nbytes():
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
                self._host[part, number] = host
            host.copy_(_bytes_of(storage), non_blocking=True)
        self._synchronize()
        left = [(storage, storage.nbytes()) for storage in found]
        for storage in found:
            storage.resize_(0)
        return left

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _storages(self, part: str) -> list[torch.UntypedStorage]:
        """The memory behind the part's tensors, each once."""
        tensors = (t for t in self._tensors(part) if t.device.type == self._device.type and t.untyped_storage().nbytes())
        return list({t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values())

    def _tensors(self, part: str) -> Iterator[torch.Tensor]:
        if part == "state":
            for each in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
                inner = each.optimizer
                yield from (p for group in inner.param_groups for p in group["params"])
                yield from (x for state in inner.state.values() for x in state.values() if isinstance(x, torch.Tensor))
            return
        for chunk in self._model:
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                tensor = buffer.grad_data if part == "gradients" else buffer.param_data
                if tensor is not None:
                    yield tensor


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)
