"""The CPU's own norm, gate, rotation and matrix product equal the plain formulas, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from vime.backends.megatron_utils.fused import rms_norm, rotate, swiglu
from vime.backends.megatron_utils.linear import linear


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]


def test_rms_norm() -> None:
    x, weight = tensors((5, 1, 3, 8), (8,))
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (8,), weight, 1e-5), rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-5), (x, weight))


def test_rms_norm_of_a_slice() -> None:
    x, weight = tensors((5, 1, 3, 20), (8,))
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a[..., 4:12], b, 1e-5), (x, weight))


def test_swiglu() -> None:
    (x,) = tensors((4, 1, 10))
    torch.testing.assert_close(swiglu(x), F.silu(x[..., :5]) * x[..., 5:], rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(swiglu, (x,))


def test_rotate() -> None:
    (x,) = tensors((5, 3, 8))
    angles = torch.rand(5, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cos, sin = torch.cat([angles.cos()] * 2, -1), angles.sin()
    expected = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotate(x, cos, sin), torch.cat([expected.real, expected.imag], -1), rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(lambda a: rotate(a, cos, sin), (x,))


@pytest.mark.parametrize("rows", [1, 7, 200])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("width", [16, 40])
def test_linear(rows: int, frozen: bool, width: int) -> None:
    x, weight, out_weight = tensors((rows, 1, 24), (width, 24), (rows, 1, width), dtype=torch.float32)
    inputs = (x,) if frozen else (x, weight)
    weight.requires_grad_(not frozen)
    got, expected = linear(x, weight), x.double() @ weight.double().t()
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-5)
    grads = torch.autograd.grad((got * out_weight).sum(), inputs)
    for grad, want in zip(grads, torch.autograd.grad((expected * out_weight).sum(), inputs), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-6, atol=2e-5)
