"""The gated delta rule against its recurrence, in double precision; packed sequences do not see one another."""

from __future__ import annotations

import pytest
import torch

from vime.backends.megatron_utils.delta import causal_convolution, gated_delta_rule


def inputs(length: int, *, batch: int = 2, heads: int = 3, key: int = 8, value: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(batch, length, heads, *size, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(key), dim=-1) for _ in range(2))
    return [q, k, normal(value), -torch.nn.functional.softplus(normal()), normal().sigmoid()]


def recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Token by token, as the paper writes it."""
    state = q.new_zeros(*q.shape[:1], q.shape[2], q.shape[3], v.shape[3])
    out = []
    for t in range(q.shape[1]):
        state = g[:, t, :, None, None].exp() * state
        seen = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - seen))
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) / q.shape[3] ** 0.5)
    return torch.stack(out, 1)


@pytest.mark.parametrize("length", [1, 5, 64, 65, 200])
def test_chunks_compute_the_recurrence(length: int) -> None:
    values = inputs(length)
    expected = recurrence(*(x.double() for x in values))
    assert float((gated_delta_rule(*values) - expected).abs().max()) <= 1e-5


def test_gradients_are_those_of_the_recurrence() -> None:
    values = inputs(70)
    ours, theirs = [x.clone().requires_grad_() for x in values], [x.double().requires_grad_() for x in values]
    weight = torch.randn(2, 70, 3, 6, generator=torch.Generator().manual_seed(1))
    (gated_delta_rule(*ours) * weight).sum().backward()
    (recurrence(*theirs) * weight.double()).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert float((mine.grad - other.grad).abs().max() / other.grad.abs().max()) <= 1e-5


def test_strong_decay_stays_finite() -> None:
    q, k, v, g, beta = inputs(130)
    q.requires_grad_()
    out = gated_delta_rule(q, k, v, g * 1000, beta)
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert q.grad is not None
    assert torch.isfinite(q.grad).all()


def test_a_convolution_stops_at_the_start_of_its_sequence() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 5, generator=generator), torch.randn(5, 4, generator=generator)
    packed = causal_convolution(x, weight, torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 0]))
    for begin, end in ((0, 5), (5, 8), (8, 9)):
        row = torch.nn.functional.pad(x[begin:end].t(), (3, 0))[None]
        alone = torch.nn.functional.conv1d(row, weight[:, None], groups=5)[0].t()
        assert torch.allclose(packed[begin:end], alone, atol=1e-6)
