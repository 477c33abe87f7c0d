"""Surrogates of the policy gradient in one form, for the registry: each reads its own flags.

(log_probs [T], old_log_probs [T], advantages [T], sequences, algorithm) -> (loss, clipped, log_ratio), [T] each;
differentiable in log_probs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vime.algorithms.cispo import clipped_weight_loss
from vime.algorithms.gspo import sequence_log_ratio
from vime.algorithms.ppo_clip import clipped_policy_loss
from vime.algorithms.sequences import Sequences
from vime.config.sections import AlgorithmConfig

__all__ = ["PolicyLoss", "clipped_ratio", "clipped_sequence_ratio", "clipped_weight"]

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
PolicyLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sequences, AlgorithmConfig], Triple]


def clipped_ratio(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, sequences: Sequences, algorithm: AlgorithmConfig
) -> Triple:
    """PPO's clip of each token's ratio."""
    return *_clip(log_probs, old_log_probs, advantages, algorithm), log_probs - old_log_probs


def clipped_sequence_ratio(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, sequences: Sequences, algorithm: AlgorithmConfig
) -> Triple:
    """GSPO's clip of each sequence's ratio."""
    log_ratio = sequence_log_ratio(log_probs, old_log_probs, sequences)
    return *_clip(log_ratio, torch.zeros_like(log_ratio), advantages, algorithm), log_ratio


def clipped_weight(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, sequences: Sequences, algorithm: AlgorithmConfig
) -> Triple:
    """CISPO's clip of the weight."""
    loss, clipped = clipped_weight_loss(
        log_probs, old_log_probs, advantages, eps_clip=algorithm.eps_clip, eps_clip_high=algorithm.eps_clip_high
    )
    return loss, clipped, log_probs - old_log_probs


def _clip(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    return clipped_policy_loss(
        log_probs,
        old_log_probs,
        advantages,
        eps_clip=algorithm.eps_clip,
        eps_clip_high=algorithm.eps_clip_high,
        eps_clip_c=algorithm.eps_clip_c,
    )
