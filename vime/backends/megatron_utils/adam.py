"""AdamW with the state layout of FusedAdam, for machines without Transformer Engine or Apex.

Megatron's distributed optimizer can save with `torch.optim.AdamW` but not resume (its checkpoint code expects "step" in the
parameter group). With this layout it resumes, and the checkpoint has the layout of a GPU run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from vime.errors import ConfigError

__all__ = ["PIECE", "FusedLayoutAdam", "use_fused_layout_adam"]

PIECE = 2**24  # numbers that are updated at once: the update needs as much memory again, which for all weights would be a peak


class FusedLayoutAdam(torch.optim.Optimizer):
    """Adam (arXiv:1412.6980, algorithm 1), with decoupled weight decay (arXiv:1711.05101, algorithm 2) when `adam_w_mode`.

    State per parameter: exp_avg, exp_avg_sq; the step count stands in the parameter group. No host synchronisation.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise ConfigError("--optimizer-cuda-graph needs Transformer Engine: install it, or leave the flag out.")
        super().__init__(params, {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            for piece in [params] if params and params[0].is_cuda else _pieces(params):
                self._update(group, piece)
        return loss

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        grads = [p.grad for p in params]
        first = [self.state[p]["exp_avg"] for p in params]
        second = [self.state[p]["exp_avg_sq"] for p in params]
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        if params[0].is_cuda and group["bias_correction"]:  # torch's kernel for CUDA devices: one pass over memory
            kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
            steps = [torch.tensor(float(group["step"]), device=params[0].device)] * len(params)
            kernel(
                params, grads, first, second, [], steps, lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, eps=group["eps"],
                amsgrad=False, maximize=False,
            )  # fmt: skip
            return
        if decay and self.adam_w_mode:
            torch._foreach_mul_(params, 1.0 - lr * decay)
        elif decay:
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        torch._foreach_lerp_(first, grads, 1.0 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1.0 - beta2)
        correction1 = 1.0 - beta1 ** group["step"] if group["bias_correction"] else 1.0
        correction2 = 1.0 - beta2 ** group["step"] if group["bias_correction"] else 1.0
        denominator = torch._foreach_sqrt(second)
        torch._foreach_div_(denominator, correction2**0.5)
        torch._foreach_add_(denominator, group["eps"])
        torch._foreach_addcdiv_(params, first, denominator, value=-lr / correction1)


def _pieces(params: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """`params` in order, in lists of at most PIECE numbers; a larger parameter stands alone."""
    piece: list[torch.Tensor] = []
    size = 0
    for p in params:
        if piece and size + p.numel() > PIECE:
            yield piece
            piece, size = [], 0
        piece.append(p)
        size += p.numel()
    if piece:
        yield piece


def use_fused_layout_adam() -> bool:
    """Put FusedLayoutAdam where Megatron fell back to torch's AdamW; False when Transformer Engine or Apex is there."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE and distrib_optimizer.Adam is not FusedLayoutAdam:
        return False
    optimizer.Adam = FusedLayoutAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.Adam = FusedLayoutAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    return True
