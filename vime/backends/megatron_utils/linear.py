"""Megatron's linear layers with oneDNN's matrix product on the CPU, and on CUDA with weight gradients added up in float32 at once.

torch sends float32 products to MKL, which leaves AVX-512 unused on processors that are not Intel's. On an AMD EPYC, one
thread, 1560 x 160 by 160 x 1024: MKL 109 GFLOP/s, oneDNN 223. oneDNN compiles a kernel for each new shape, which takes
milliseconds: the number of tokens should take few values (`packing.computed` rounds it).

On CUDA Megatron without Apex makes each weight's gradient in bfloat16 and adds it to the float32 buffer afterwards. cuBLAS does both in one
product, unrounded.
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


class _Accumulated(torch.autograd.Function):
    """x [..., K] times weight [N, K] transposed; the weight's gradient goes into `weight.main_grad`, as Megatron's fused path has it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight
        return torch.matmul(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        x, weight = ctx.saved_tensors
        grad_x = torch.matmul(grad, weight) if ctx.needs_input_grad[0] else None
        total = ctx.parameter.main_grad
        torch.ops.aten.addmm.dtype_out(total, grad.flatten(0, -2).t(), x.flatten(0, -2), torch.float32, out=total)
        ctx.parameter.grad_added_to_main_grad = True
        return grad_x, torch.empty_like(weight)  # what it holds is not read: the hook that follows is told so


def _accumulates(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Training on CUDA with a float32 gradient buffer."""
    total = getattr(weight, "main_grad", None)
    wanted = x.is_cuda and x.dtype == torch.bfloat16 and weight.requires_grad and torch.is_grad_enabled()
    return wanted and total is not None and total.dtype == torch.float32


def _alone(options: dict[str, Any]) -> bool:
    """A product without communication."""
    if options["allreduce_dgrad"] or options["sequence_parallel"] or options["gtp_remat_size"] > 1:
        return False
    return not options["gradient_accumulation_fusion"] and options["grad_output_buffer"] is None


def _ours(x: torch.Tensor, options: dict[str, Any]) -> bool:
    """A product without communication, and oneDNN is there for it."""
    return _alone(options) and x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()


class ColumnLinear(ColumnParallelLinear):
    """Megatron's, with the product above where nothing is communicated inside it."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if not args and _alone(options) and _accumulates(input, weight):
            out = _Accumulated.apply(input, weight)
        elif args or not _ours(input, options):
            return super()._forward_impl(input, weight, *args, **options)
        else:
            out = linear(input, weight)
        return out if options["bias"] is None else out + options["bias"]


class RowLinear(RowParallelLinear):
    """Megatron's, with the product above; its sum over ranks comes after it."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if not args and _alone(options) and _accumulates(input, weight):
            return _Accumulated.apply(input, weight)
        if args or not _ours(input, options):
            return super()._forward_impl(input, weight, *args, **options)
        return linear(input, weight)
