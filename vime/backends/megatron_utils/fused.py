"""RMSNorm and SwiGLU for the CPU, with backward passes written out: fewer passes over memory than the
chains of operations that autograd would differentiate. The numbers are theirs up to rounding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.autograd.function import once_differentiable

__all__ = ["rms_norm", "swiglu"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467, eq. 4) over the last dimension of x [..., H]; weight [H]."""
    return _RmsNorm.apply(x, weight, eps)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(a) * b (arXiv:2002.05202, eq. 6) with a, b the halves of x [..., 2 F] -> [..., F]."""
    return _SwiGlu.apply(x)


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
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        of_gate, of_up = out.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
        return out
