"""Megatron's linear layers with oneDNN's matrix product on the CPU.

torch sends float32 products to MKL, which leaves AVX-512 unused on processors that are not Intel's. On an AMD EPYC, one
thread, 1560 x 160 by 160 x 1024: MKL 109 GFLOP/s, oneDNN 223. oneDNN compiles a kernel for each new shape, which takes
milliseconds: the number of tokens should take few values (`packing.computed` rounds it).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch.autograd.function import once_differentiable

__all__ = ["ColumnLinear", "RowLinear", "linear"]


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed -> [..., N]; float32 on the CPU. Differentiable in both."""
    return _Linear.apply(x, weight)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def _of_weight(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """grad [T, N] transposed times x [T, K] -> [N, K]; oneDNN copies the first factor, so that is the smaller one."""
    return _product(x.t(), grad.t()).t() if x.shape[1] < grad.shape[1] else _product(grad.t(), x.t())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = _product(grad, weight.t()) if ctx.needs_input_grad[0] else None
        grad_weight = _of_weight(grad.flatten(0, -2), x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def _ours(x: torch.Tensor, options: dict[str, Any]) -> bool:
    """A product without communication, and oneDNN is there for it."""
    if options["allreduce_dgrad"] or options["sequence_parallel"] or options["gtp_remat_size"] > 1:
        return False
    if options["gradient_accumulation_fusion"] or options["grad_output_buffer"] is not None:
        return False
    return x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()


class ColumnLinear(ColumnParallelLinear):
    """Megatron's, with the product above where nothing is communicated inside it."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if args or not _ours(input, options):
            return super()._forward_impl(input, weight, *args, **options)
        out = linear(input, weight)
        return out if options["bias"] is None else out + options["bias"]


class RowLinear(RowParallelLinear):
    """Megatron's, with the product above; its sum over ranks comes after it."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if args or not _ours(input, options):
            return super()._forward_impl(input, weight, *args, **options)
        return linear(input, weight)
