"""What a user would write for --custom-loss-function-path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["policy_gradient"]


def policy_gradient(
    args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The policy loss of the first step on new samples, where no ratio is clipped."""
    assert logits.shape[:2] == batch["tokens"].shape
    log_probs = torch.cat(batch["compute_log_probs"]()[0])
    loss = sum_of_sample_mean(-(log_probs - log_probs.detach()).exp() * torch.cat(batch["advantages"]))
    return loss, {"own": loss.detach()}
