"""Token rewards, returns and generalised advantages against the recursions of the papers in Python floats."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vime.algorithms.token_returns import BLOCK, discounted_returns, generalized_advantages, token_rewards


def gae(rewards: list[float], values: list[float], gamma: float, lambd: float) -> list[float]:
    """arXiv:1506.02438, eq. 16, as a sum over all later steps."""
    after = [*values[1:], 0.0][: len(values)]
    deltas = [r + gamma * v1 - v for r, v1, v in zip(rewards, after, values, strict=True)]
    return [math.fsum((gamma * lambd) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 0.5), (0.5, 1.0)])
@pytest.mark.parametrize("length", [0, 1, 2, 7, BLOCK, BLOCK + 1, 2 * BLOCK + 9])
def test_generalised_advantages_equal_the_sum_over_later_steps(length: int, gamma: float, lambd: float) -> None:
    rng = np.random.default_rng(length)
    rewards, values = rng.normal(size=length), rng.normal(size=length)
    got = generalized_advantages(torch.tensor(rewards), torch.tensor(values), gamma=gamma, lambd=lambd)
    np.testing.assert_allclose(got.numpy(), gae(rewards.tolist(), values.tolist(), gamma, lambd), rtol=0, atol=1e-10)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_returns_are_the_discounted_sum_of_what_follows(gamma: float) -> None:
    rewards = [0.5, -1.0, 0.0, 2.0]
    expected, following = [], 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        expected.insert(0, following)
    np.testing.assert_allclose(discounted_returns(torch.tensor(rewards, dtype=torch.float64), gamma).numpy(), expected, rtol=0, atol=1e-12)


def test_with_lambda_1_advantages_plus_values_are_the_returns() -> None:
    rng = np.random.default_rng(1)
    rewards, values = torch.tensor(rng.normal(size=20)), torch.tensor(rng.normal(size=20))
    got = generalized_advantages(rewards, values, gamma=0.9, lambd=1.0) + values
    torch.testing.assert_close(got, discounted_returns(rewards, 0.9), rtol=0, atol=1e-12)


def test_the_reward_is_the_last_tokens_and_each_pays_for_its_divergence() -> None:
    kl = torch.tensor([0.5, -0.25, 1.0])
    assert token_rewards(2.0, kl, 0.1).tolist() == pytest.approx([-0.05, 0.025, 1.9])
    assert token_rewards(2.0, torch.zeros(0), 0.1).tolist() == []
