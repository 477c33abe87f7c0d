"""Formulas that `torch.compile` makes one kernel each of, for CUDA devices. On the CPU they run as they are written, for comparison.

A chain of operations reads and writes device memory once an operation; there, memory and not arithmetic is what these cost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["log_prob_grads", "log_prob_sums", "swiglu", "turn"]


@functools.cache
def _compiled(formula: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(formula, fullgraph=True)


def _kernel(formula: Callable[..., Any]) -> Callable[..., Any]:
    """`formula` as one kernel, for any number of rows (the first dimension of each tensor with as many as its first argument's)."""

    @functools.wraps(formula)
    def call(first: torch.Tensor, *others: Any) -> Any:
        if first.device.type == "cpu":
            return formula(first, *others)
        for x in (first, *others):
            if isinstance(x, torch.Tensor) and x.ndim and len(x) == len(first):
                torch._dynamo.maybe_mark_dynamic(x, 0)
        return _compiled(formula)(first, *others)

    return call


@_kernel
def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    """Rotary embedding as `fused.rotate` has it, by the angle times `sign`: x [T, H, D], cos [T, 1, D] and sin [T, 1, D / 2] in float32."""
    x1, x2 = x.float().chunk(2, dim=-1)
    c = cos[..., : cos.shape[-1] // 2]
    return torch.cat([x1 * c - x2 * (sin * sign), x2 * c + x1 * (sin * sign)], dim=-1).to(x.dtype)


@_kernel
def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(a) * b with a, b the halves of x [..., 2 F], computed in float32 -> [..., F] in x's dtype."""
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


@_kernel
def log_prob_sums(logits: torch.Tensor, peak: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum e^x, sum x e^x) over the columns of logits [N, V], with x = scale logits - peak [N]; both [N] in peak's dtype."""
    x = logits.to(peak.dtype) * scale - peak[:, None]
    e = x.exp()
    return e.sum(-1), (e * x).sum(-1)


@_kernel
def log_prob_grads(
    logits: torch.Tensor,
    column: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    entropy: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """The gradient [N, V] of logits [N, V] in their dtype: `log_probs`' formulas with z = scale logits.

    column [N] is each label's, -1 where it lies in another rank's slice; lse, grad (of the label's log-prob) and entropy [N] in
    float32, as grad_entropy [N] is; None = the entropies give no gradient.
    """
    log_p = logits.to(lse.dtype) * scale - lse[:, None]
    p = log_p.exp()
    out = torch.where(torch.arange(logits.shape[1], device=logits.device)[None] == column[:, None], grad[:, None], 0.0) - p * grad[:, None]
    if grad_entropy is not None:
        out = out - p * (log_p + entropy[:, None]) * grad_entropy[:, None]
    return (out * scale).to(logits.dtype)
