"""The critic's loss.

Clipped as in PPO's reference implementation (Huang et al., "The 37 Implementation Details of PPO", 2022, detail 9):

    L = max((V - G)^2, (clip(V, V_old - eps, V_old + eps) - G)^2)      G: the return that V is to predict
"""

from __future__ import annotations

import torch

__all__ = ["clipped_value_loss"]


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, clipped) per token, of the inputs' shape; `clipped` is 1 where the clip decides the loss. Differentiable in `values`."""
    bounded = torch.clamp(values, old_values - value_clip, old_values + value_clip)
    plain, other = (values - returns).square(), (bounded - returns).square()
    return torch.maximum(plain, other), (other > plain).to(values.dtype).detach()
