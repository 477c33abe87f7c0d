"""RMSNorm and SwiGLU's gradient for CUDA devices, in Triton: each value is read once and written once.

torch's own RMSNorm takes one row a block, which for the 128 columns of a head leaves most of the device idle. Loaded on CUDA only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["rms_norm", "swiglu_grad"]

TILE = 8192  # values that a program holds at a time
PROGRAMS = 4  # to a multiprocessor, where each goes over many rows


@triton.jit
def _norm(
    x: Any,
    weight: Any,
    out: Any,
    rows: Any,
    group: Any,
    stride_t: Any,
    stride_g: Any,
    eps: Any,
    width: tl.constexpr,
    columns: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.arange(0, columns)
    mask = (row[:, None] < rows) & (column[None, :] < width)
    at = (row // group).to(tl.int64) * stride_t + (row % group).to(tl.int64) * stride_g
    value = tl.load(x + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / width + eps)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    result = value * scale[:, None] * factor[None, :]
    tl.store(out + row[:, None].to(tl.int64) * width + column[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _norm_grad(
    x: Any,
    weight: Any,
    grad: Any,
    grad_x: Any,
    grad_weight: Any,
    rows: Any,
    group: Any,
    stride_t: Any,
    stride_g: Any,
    eps: Any,
    width: tl.constexpr,
    columns: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    column = tl.arange(0, columns)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([columns], dtype=tl.float32)
    for begin in range(tl.program_id(0) * tile, rows, tl.num_programs(0) * tile):
        row = begin + tl.arange(0, tile)
        mask = (row[:, None] < rows) & inside[None, :]
        at = (row // group).to(tl.int64) * stride_t + (row % group).to(tl.int64) * stride_g
        flat = row[:, None].to(tl.int64) * width + column[None, :]
        value = tl.load(x + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        given = tl.load(grad + flat, mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, axis=1) / width + eps)
        normed = value * scale[:, None]
        weighted = given * factor[None, :]
        along = tl.sum(weighted * normed, axis=1) / width
        result = (weighted - normed * along[:, None]) * scale[:, None]
        tl.store(grad_x + flat, result.to(grad_x.dtype.element_ty), mask=mask)
        total += tl.sum(given * normed, axis=0)
    tl.store(grad_weight + tl.program_id(0) * width + column, total, mask=inside)


@triton.jit
def _swiglu_grad(grad: Any, x: Any, out: Any, count: Any, width: Any, block: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = at < count
    place = (at // width) * (2 * width) + at % width
    given = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + place + width, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_gate = given * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(out + place, of_gate.to(out.dtype.element_ty), mask=mask)
    tl.store(out + place + width, (given * gate * sigmoid).to(out.dtype.element_ty), mask=mask)


class _Rows:
    """x [..., H] as rows: `count` of them, row r at (r // group) stride_t + (r % group) stride_g. A copy where that does not fit."""

    def __init__(self, x: torch.Tensor) -> None:
        self.width = x.shape[-1]
        self.count = x.numel() // self.width
        if x.ndim == 4 and x.shape[1] == 1 and x.stride(3) == 1:  # [T, 1, heads, H], a part of a wider tensor
            self.x, self.group, self.strides = x, x.shape[2], (x.stride(0), x.stride(2))
        else:
            self.x, self.group, self.strides = x.contiguous(), 1, (self.width, 0)
        self.columns = triton.next_power_of_2(self.width)
        self.tile = max(1, TILE // self.columns)

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        return self.count, self.group, *self.strides


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = _Rows(x)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(rows.count, rows.tile),)
        _norm[grid](rows.x, weight, out, *rows.arguments, eps, rows.width, rows.columns, rows.tile, num_warps=8)
        ctx.save_for_backward(rows.x, weight)
        ctx.eps = eps
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        rows = _Rows(x)
        grad_x = torch.empty(grad.shape, dtype=x.dtype, device=x.device)
        programs = min(triton.cdiv(rows.count, rows.tile), PROGRAMS * _multiprocessors(x.device))
        parts = torch.empty(programs, rows.width, dtype=torch.float32, device=x.device)
        _norm_grad[(programs,)](
            x, weight, grad.contiguous(), grad_x, parts, *rows.arguments, ctx.eps, rows.width, rows.columns, rows.tile, num_warps=8
        )
        return grad_x, parts.sum(0).to(weight.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467, eq. 4) over the last dimension of x [..., H]; weight [H]. Sums in float32."""
    return _RmsNorm.apply(x, weight, eps)


def swiglu_grad(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient [..., 2 F] of silu(a) * b, with a and b the halves of x [..., 2 F], for grad [..., F]."""
    grad, x = grad.contiguous(), x.contiguous()
    out = torch.empty_like(x)
    _swiglu_grad[(triton.cdiv(grad.numel(), 2048),)](grad, x, out, grad.numel(), grad.shape[-1], 2048, num_warps=8)
    return out


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
