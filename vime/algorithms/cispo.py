"""Clipped importance-sampling weights instead of clipped updates: every token keeps its gradient.

CISPO (MiniMax-M1, arXiv:2506.13585, eqs. 4 and 5):   L = -sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi      with r = pi / pi_old
"""

from __future__ import annotations

import torch

__all__ = ["clipped_weight_loss"]


def clipped_weight_loss(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, *, eps_clip: float, eps_clip_high: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, clipped) per token, of the inputs' shape; `clipped` is 1 where the weight is at a bound.

    Log-probs in nats; `eps_clip_high` defaults to `eps_clip`. The paper sets no lower bound: eps_clip >= 1. Differentiable in `log_probs`.
    """
    ratio = torch.exp(log_probs.detach() - old_log_probs)
    weight = ratio.clamp(1 - eps_clip, 1 + (eps_clip if eps_clip_high is None else eps_clip_high))
    return -weight * advantages * log_probs, (weight != ratio).to(log_probs.dtype)
