"""The clipped surrogate of the policy gradient.

PPO (arXiv:1707.06347, eq. 7):      L = max(-r A, -clip(r, 1 - eps, 1 + eps) A)      with r = pi / pi_old
Clip-higher (DAPO, arXiv:2503.14476, eq. 10): the upper distance differs from the lower one.
Dual clip (arXiv:1912.09729, eq. 5): where A < 0, L is at most -c A, so that a large r cannot make the loss explode.
"""

from __future__ import annotations

import torch

__all__ = ["clipped_policy_loss"]


def clipped_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, clipped) per token, both of the inputs' shape; `clipped` is 1 where the ratio's clip decides the loss.

    Log-probs in nats. `eps_clip_high` defaults to `eps_clip`; no dual clip without `eps_clip_c` (> 1). Differentiable in
    `log_probs`.
    """
    high = eps_clip if eps_clip_high is None else eps_clip_high
    ratio = torch.exp(log_probs - old_log_probs)
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - eps_clip, 1 + high) * advantages
    loss = torch.maximum(plain, bounded)
    clipped = (bounded > plain).to(loss.dtype).detach()
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, clipped
