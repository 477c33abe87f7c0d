"""FusedLayoutAdam is Adam, with the state where Megatron's distributed optimizer looks for it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vime.backends.megatron_utils import adam
from vime.backends.megatron_utils.adam import FusedLayoutAdam
from vime.backends.megatron_utils.optimizer import all_moments, begin_moments_anew, drop_moments


@pytest.mark.parametrize(("mode", "reference"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_it_equals_torchs(mode: bool, reference: type[torch.optim.Optimizer]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(3, 4, generator=generator), torch.randn(5, generator=generator)]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    kind = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    a, b = FusedLayoutAdam(ours, adam_w_mode=mode, **kind), reference(theirs, **kind)
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, atol=1e-6)


def test_the_update_goes_piece_by_piece_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def updated() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in (3, 20, 4, 4, 1)]
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        FusedLayoutAdam(params, lr=0.1).step()
        return [p.detach() for p in params]

    whole = updated()
    monkeypatch.setattr(adam, "PIECE", 8)
    assert [len(piece) for piece in adam._pieces(whole)] == [1, 1, 2, 1]
    assert all(torch.equal(p, q) for p, q in zip(updated(), whole, strict=True))


def test_the_step_stands_in_the_group_and_moments_in_the_state() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedLayoutAdam([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    assert set(optimizer.state[parameter]) == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("forget", [begin_moments_anew, drop_moments])
def test_moments_that_are_forgotten_begin_as_new_ones(forget: Callable[[Any], None]) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(4, 5, generator=generator)
    old, new = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    used, fresh = FusedLayoutAdam([old], lr=0.1), FusedLayoutAdam([new], lr=0.1)

    def step(adam: FusedLayoutAdam, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        parameter.grad = gradient.clone()
        adam.step()

    for gradient in gradients[:2]:
        step(used, old, gradient)
    forget(SimpleNamespace(optimizer=used))
    with torch.no_grad():
        new.copy_(old)
    for gradient in gradients[2:]:
        step(used, old, gradient)
        step(fresh, new, gradient)
        assert torch.equal(old, new)


def test_moments_that_are_not_there_are_zeros_in_a_checkpoint_and_gone_again() -> None:
    known, unknown = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    adam = FusedLayoutAdam([known, unknown])
    known.grad = torch.ones(2)
    adam.step()
    before = adam.state[known]["exp_avg"].clone()
    with all_moments(SimpleNamespace(optimizer=adam)):
        assert torch.equal(adam.state[known]["exp_avg"], before)
        assert not adam.state[unknown]["exp_avg"].any()
        assert not adam.state[unknown]["exp_avg_sq"].any()
    assert set(adam.state) == {known}
