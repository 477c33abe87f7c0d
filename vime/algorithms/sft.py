"""Supervised fine-tuning: the negative log-likelihood of the trained tokens."""

from __future__ import annotations

import torch

__all__ = ["negative_log_likelihood"]


def negative_log_likelihood(log_probs: torch.Tensor) -> torch.Tensor:
    """-log pi(token) per token, in nats."""
    return -log_probs
