"""Rewards of single tokens, and what follows from them: returns (REINFORCE++) and generalised advantages (PPO).

Time counts trained tokens only: text that tools or templates put between them is no action of the policy, takes no reward and discounts
nothing. All functions take the [N] values of one sample's trained tokens in order.
"""

from __future__ import annotations

import torch

__all__ = ["discounted_returns", "generalized_advantages", "token_rewards"]

BLOCK = 256  # tokens


def token_rewards(reward: float, kl: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """[N]: -kl_coef x KL_t, and the response's reward at the last token (InstructGPT, arXiv:2203.02155, eq. 2, token by token)."""
    rewards = -kl_coef * kl
    if len(rewards):
        rewards[-1] += reward
    return rewards


def discounted_returns(rewards: torch.Tensor, gamma: float) -> torch.Tensor:
    """[N]: G_t = r_t + gamma G_{t+1} (REINFORCE++, arXiv:2501.03262, section 3, with gamma = 1)."""
    return generalized_advantages(rewards, torch.zeros_like(rewards), gamma=gamma, lambd=1.0)


def generalized_advantages(rewards: torch.Tensor, values: torch.Tensor, *, gamma: float, lambd: float) -> torch.Tensor:
    """[N]: A_t = d_t + gamma lambd A_{t+1}, d_t = r_t + gamma V_{t+1} - V_t, V after the end = 0 (GAE, arXiv:1506.02438, eqs. 14-16).

    A sum over a matrix of powers for each block of tokens, the blocks in reverse: as exact as the loop, and N / 256 steps.
    """
    following = torch.cat([values[1:], values.new_zeros(min(len(values), 1))])
    deltas = rewards + gamma * following - values
    out = torch.empty_like(deltas)
    carry = deltas.new_zeros(())
    for start in reversed(range(0, len(deltas), BLOCK)):
        block = deltas[start : start + BLOCK]
        steps = torch.arange(len(block), device=deltas.device)
        distance = steps[None] - steps[:, None]
        powers = torch.where(distance >= 0, (gamma * lambd) ** distance.clamp(min=0).to(deltas.dtype), 0.0)
        out[start : start + BLOCK] = powers @ block + (gamma * lambd) ** (len(block) - steps).to(deltas.dtype) * carry
        carry = out[start]
    return out
