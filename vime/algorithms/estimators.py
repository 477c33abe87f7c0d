"""Advantages of the trained tokens of one sample: what --advantage-estimator chooses among.

Each takes a `Tokens` and returns (advantages, returns), [N] each: what weighs the token's log-probability, and what a critic is to predict.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vime.algorithms.token_returns import discounted_returns, generalized_advantages, token_rewards

__all__ = ["Tokens", "actor_critic", "baseline_minus_kl", "broadcast", "kl_penalised_returns"]

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The N trained tokens of one sample, in order."""

    reward: float  # the response's, after the comparison in its group
    kl: torch.Tensor  # [N] estimate of KL(policy || reference) of each token; zeros without --kl-coef
    values: torch.Tensor  # [N] the critic's, of the state before each token; zeros without a critic
    kl_coef: float
    gamma: float
    lambd: float


def broadcast(tokens: Tokens) -> Pair:
    """The compared reward on every token (GRPO, DeepSeekMath, arXiv:2402.03300, section 4.1.2, outcome supervision)."""
    out = torch.full_like(tokens.kl, tokens.reward)
    return out, out


def kl_penalised_returns(tokens: Tokens) -> Pair:
    """A_t = r - kl_coef sum_{i >= t} KL_i, discounted by gamma (REINFORCE++, arXiv:2501.03262, section 3); whiten it over the batch."""
    out = discounted_returns(token_rewards(tokens.reward, tokens.kl, tokens.kl_coef), tokens.gamma)
    return out, out


def baseline_minus_kl(tokens: Tokens) -> Pair:
    """A_t = (r - group mean) - kl_coef KL_t (REINFORCE++-baseline, arXiv:2501.03262, section 3); whiten it over the batch."""
    out = tokens.reward - tokens.kl_coef * tokens.kl
    return out, out


def actor_critic(tokens: Tokens) -> Pair:
    """GAE (arXiv:1506.02438, eq. 16) over the KL-penalised token rewards; returns = advantages + values (PPO, arXiv:1707.06347, eq. 11)."""
    rewards = token_rewards(tokens.reward, tokens.kl, tokens.kl_coef)
    advantages = generalized_advantages(rewards, tokens.values, gamma=tokens.gamma, lambd=tokens.lambd)
    return advantages, advantages + tokens.values
