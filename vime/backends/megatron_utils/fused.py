"""RMSNorm, SwiGLU and rotary embedding for the CPU, with backward passes written out: fewer passes over memory than the
chains of operations that autograd would differentiate. The numbers are theirs up to rounding. On a CUDA device
each is a kernel (`compiled`, `triton_kernels`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.autograd.function import once_differentiable

from vime.backends.megatron_utils import compiled

__all__ = ["rms_norm", "rotate", "swiglu"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467, eq. 4) over the last dimension of x [..., H]; weight [H]."""
    return _RmsNorm.apply(x, weight, eps)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(a) * b (arXiv:2002.05202, eq. 6) with a, b the halves of x [..., 2 F] -> [..., F]."""
    return _SwiGlu.apply(x)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (arXiv:2104.09864, eq. 34) in Hugging Face's order: dimension i turns with i + D / 2.

    x [T, H, D]; cos [T, 1, D], its halves equal; sin [T, 1, D / 2] -> [T, H, D].
    """
    return _Rotate.apply(x, cos, sin)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        by_weight = grad * normed
        along = torch.mv(by_weight.reshape(-1, len(weight)), weight).view(scale.shape).div_(len(weight))
        grad_x = torch.mul(grad, weight).addcmul_(normed, along, value=-1.0).mul_(scale)
        return grad_x, by_weight.reshape(-1, len(weight)).sum(0), None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        if x.is_cuda:
            return compiled.swiglu(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        if x.is_cuda:
            from vime.backends.megatron_utils import triton_kernels  # loaded where there is a device for it

            return triton_kernels.swiglu_grad(grad, x)
        gate, up = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        of_gate, of_up = out.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
        return out


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    if x.device.type != "cpu":
        return compiled.turn(x, cos, sin, sign)
    out = x * cos
    (x1, x2), (out1, out2) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    out1.addcmul_(x2, sin, value=-sign)
    out2.addcmul_(x1, sin, value=sign)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1.0), None, None
