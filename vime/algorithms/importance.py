"""Correction for data that another policy generated: the engine's probabilities differ from the trainer's, or are older.

With w = pi_trainer / pi_engine of a token, of the whole response (the product over its tokens) or its geometric mean:

    clip    w within [low, high]; low = 0 is TIS (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
            Training", 2025: min(w, C)); V-trace's truncation (arXiv:1802.01561, eq. 1) is the same
    mask    w inside [low, high] and 0 outside: IcePop (arXiv:2510.18855, section 3.2) for tokens, MIS (Liu et al., "When Speed
            Kills Stability", 2025) for sequences

Rejection takes tokens or whole responses out of the loss and leaves the others' weights alone. What is taken out still counts in the
denominators of the loss: outliers become silent, the rest does not become louder.
"""

from __future__ import annotations

import math

import torch

from vime.algorithms.sequences import Sequences

__all__ = ["LEVELS", "importance_weights", "kept_tokens"]

LEVELS = ("token", "sequence", "geometric")


def _at_level(log_ratio: torch.Tensor, sequences: Sequences, level: str) -> torch.Tensor:
    """[T]: log w at each position."""
    if level == "token":
        return log_ratio
    return sequences.spread(sequences.sums(log_ratio) if level == "sequence" else sequences.means(log_ratio))


def importance_weights(
    log_ratio: torch.Tensor, sequences: Sequences, *, level: str = "token", mode: str = "clip", low: float = 0.0, high: float = 2.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, bounded): [T] each, without gradient; `bounded` is 1 where w was outside [low, high].

    `log_ratio` [T] is log pi_trainer - log pi_engine in nats; `level` one of LEVELS, `mode` clip or mask.
    """
    weights = torch.exp(_at_level(log_ratio.detach(), sequences, level))
    outside = (weights < low) | (weights > high)
    bounded = weights.clamp(low, high) if mode == "clip" else torch.where(outside, torch.zeros_like(weights), weights)
    return bounded, outside.to(weights.dtype)


def kept_tokens(
    log_ratio: torch.Tensor,
    sequences: Sequences,
    *,
    level: str = "token",
    low: float = 0.5,
    high: float = 2.0,
    veto: float | None = None,
) -> torch.Tensor:
    """[T]: 1 where w is inside [low, high], 0 where it is rejected.

    With `veto` a whole sequence is rejected as soon as one of its tokens has w < veto.
    """
    log_ratio = log_ratio.detach()
    w = torch.exp(_at_level(log_ratio, sequences, level))
    kept = ((w >= low) & (w <= high)).to(log_ratio.dtype)
    if veto is not None:
        catastrophic = sequences.sums((log_ratio < math.log(veto)).to(log_ratio.dtype))
        kept = kept * sequences.spread((catastrophic == 0).to(log_ratio.dtype))
    return kept
