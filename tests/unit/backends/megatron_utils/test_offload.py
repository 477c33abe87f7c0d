"""What is given back comes back, behind the same tensors and all their views."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from vime.backends.megatron_utils.offload import Offload


def trainer() -> tuple[Any, Any, list[torch.Tensor]]:
    """Buffers with views, as Megatron has them, and an optimizer that has taken a step."""
    weights, grads = torch.arange(6.0), torch.ones(6)
    master = torch.nn.Parameter(torch.arange(6.0) * 2)
    optimizer = torch.optim.Adam([master])
    master.grad = torch.ones(6)
    optimizer.step()
    chunk = SimpleNamespace(buffers=[SimpleNamespace(param_data=weights, grad_data=grads)], expert_parallel_buffers=[])
    return [chunk], SimpleNamespace(optimizer=optimizer), [weights, grads, master, *optimizer.state[master].values()]


def test_everything_comes_back_and_gradients_are_zero() -> None:
    model, optimizer, tensors = trainer()
    view, before = tensors[0][2:4], [t.detach().clone() for t in tensors]
    offload = Offload(model, optimizer, torch.device("cpu"))
    for _ in range(2):
        offload.give_back(weights=False)
        assert tensors[0].untyped_storage().nbytes() == 24
        assert [t.untyped_storage().nbytes() for t in tensors[1:3]] == [0, 0]
        offload.give_back(weights=True)
        assert tensors[0].untyped_storage().nbytes() == 0
        offload.take_back()
        assert torch.equal(view, before[0][2:4])
        assert torch.equal(tensors[1], torch.zeros(6))
        assert all(torch.equal(now, then) for now, then in zip([tensors[0], *tensors[2:]], [before[0], *before[2:]], strict=True))


def test_what_changed_meanwhile_is_what_comes_back() -> None:
    model, optimizer, tensors = trainer()
    offload = Offload(model, optimizer, torch.device("cpu"))
    offload.give_back(weights=True)
    offload.take_back()
    tensors[0].add_(10)
    offload.give_back(weights=True)
    offload.take_back()
    assert torch.equal(tensors[0], torch.arange(6.0) + 10)


def test_taking_back_what_is_not_gone_changes_nothing() -> None:
    model, optimizer, tensors = trainer()
    Offload(model, optimizer, torch.device("cpu")).take_back()
    assert torch.equal(tensors[1], torch.ones(6))
