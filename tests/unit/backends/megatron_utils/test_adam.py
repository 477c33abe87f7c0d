"""FusedLayoutAdam is Adam, with the state where Megatron's distributed optimizer looks for it."""

from __future__ import annotations

import pytest
import torch

from vime.backends.megatron_utils import adam
from vime.backends.megatron_utils.adam import FusedLayoutAdam


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
