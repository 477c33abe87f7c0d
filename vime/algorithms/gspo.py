"""Group sequence policy optimization: the probability ratio of the whole response, length-normalised, in PPO's clip.

GSPO (arXiv:2507.18071, eqs. 5 and 7):   L_i = max(-s_i A_i, -clip(s_i, 1 - eps, 1 + eps) A_i),   s_i = (pi(y_i) / pi_old(y_i))^(1 / |y_i|)
"""

from __future__ import annotations

import torch

from vime.algorithms.sequences import Sequences

__all__ = ["sequence_log_ratio"]


def sequence_log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """log s_i of each position's sequence, [T] in nats: the mean of log pi - log pi_old over its trained tokens. Differentiable."""
    return sequences.spread(sequences.means(log_probs - old_log_probs))
