"""Estimators of KL(policy || reference) from the log-probs of sampled tokens.

J. Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html, 2020), with d = log pi - log pi_ref:

    k1 = d                  unbiased, high variance; as a loss its expected gradient is 0 on-policy
    k2 = d^2 / 2            biased, low variance
    k3 = exp(-d) - 1 + d    unbiased, low variance, never negative; GRPO's choice (arXiv:2402.03300, eq. 4)

Weighted by pi / pi_old (`unbiased`) an estimator stays unbiased on tokens that an older policy sampled, and so does its gradient
(DeepSeek-V3.2, arXiv:2512.02556, section 3.1).

All take and return tensors of one shape, log-probs in nats, and are differentiable in `log_probs`.
"""

from __future__ import annotations

import torch

__all__ = ["k1", "k2", "k3", "low_var_kl", "unbiased"]


def k1(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """d."""
    return log_probs - ref_log_probs


def k2(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """d^2 / 2."""
    return (log_probs - ref_log_probs).square() / 2


def k3(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """exp(-d) - 1 + d; expm1 keeps it exact for small d."""
    d = log_probs - ref_log_probs
    return torch.expm1(-d) + d


def low_var_kl(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """k3 held within [-10, 10], so that one token far from the reference cannot take over the batch."""
    return k3(log_probs, ref_log_probs).clamp(-10, 10)


def unbiased(estimate: torch.Tensor, log_probs: torch.Tensor, old_log_probs: torch.Tensor) -> torch.Tensor:
    """pi / pi_old x `estimate`, differentiable in both factors: on samples of pi_old its mean and gradient are those under pi."""
    return torch.exp(log_probs - old_log_probs) * estimate
