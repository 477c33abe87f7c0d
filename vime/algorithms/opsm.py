"""Off-policy sequence masking: bad responses that the policy has moved far away from teach nothing.

DeepSeek-V3.2 (arXiv:2512.02556, section 3.1): the mask of a sequence is 0 where A < 0 and (1 / |o|) sum_t log(pi_old / pi) > delta,
pi_old being the probability that the engine returned, so that stale weights and numerical mismatch both count.
"""

from __future__ import annotations

import torch

from vime.algorithms.sequences import Sequences

__all__ = ["off_policy_mask"]


def off_policy_mask(
    log_probs: torch.Tensor, behaviour_log_probs: torch.Tensor, advantages: torch.Tensor, sequences: Sequences, *, delta: float
) -> torch.Tensor:
    """[T]: 0 at tokens with a negative advantage in sequences whose divergence exceeds `delta` nats a token, else 1. No gradient."""
    divergence = sequences.spread(sequences.means(behaviour_log_probs - log_probs.detach()))
    return 1.0 - ((advantages < 0) & (divergence > delta)).to(log_probs.dtype)
