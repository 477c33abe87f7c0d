"""Group normalisation against a plain loop written from the paper, and its edge cases."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vime.algorithms.group_norm import normalize_group_rewards
from vime.errors import RewardError


def by_hand(rewards: list[float], groups: list[int], *, divide: bool) -> list[float]:
    """(r - mean) / (std + 1e-6) with the unbiased deviation, by loops."""
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        same = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = sum(same) / len(same)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in same) / (len(same) - 1)) if len(same) > 1 else 0.0
        out.append((reward - mean) / (deviation + 1e-6) if divide and len(same) > 1 else reward - mean)
    return out


@pytest.mark.parametrize("divide", [True, False])
def test_uneven_groups_each_use_their_own_statistics(divide: bool) -> None:
    rewards = [1.0, 0.0, 0.5, 1.0, 3.0, -2.0, 0.25]
    groups = [7, 7, 9, 9, 9, 9, 7]
    got = normalize_group_rewards(rewards, groups, list(range(7)), divide_std=divide)
    np.testing.assert_allclose(got, by_hand(rewards, groups, divide=divide), rtol=0, atol=1e-12)


def test_segments_of_one_rollout_count_once_and_share_the_value() -> None:
    got = normalize_group_rewards([1.0, 1.0, 1.0, 0.0], [0, 0, 0, 0], [5, 5, 5, 6])
    plain = normalize_group_rewards([1.0, 0.0], [0, 0], [5, 6])
    np.testing.assert_array_equal(got, [plain[0], plain[0], plain[0], plain[1]])


def test_order_of_samples_does_not_matter() -> None:
    rewards, groups = [1.0, 0.0, 4.0, 2.0], [0, 1, 0, 1]
    got = normalize_group_rewards(rewards, groups, [0, 1, 2, 3])
    turned = normalize_group_rewards(rewards[::-1], groups[::-1], [3, 2, 1, 0])
    np.testing.assert_allclose(got, turned[::-1], rtol=0, atol=1e-15)


def test_equal_rewards_give_zero_and_a_lone_rollout_is_not_divided() -> None:
    np.testing.assert_allclose(normalize_group_rewards([0.1] * 6, [0] * 6, list(range(6))), 0.0, atol=1e-9)
    assert normalize_group_rewards([3.0], [0], [0]).tolist() == [0.0]


def test_without_subtracting_the_mean_rewards_stay() -> None:
    assert normalize_group_rewards([3.0, 1.0], [0, 0], [0, 1], subtract_mean=False).tolist() == [3.0, 1.0]


def test_segments_with_different_rewards_are_refused() -> None:
    with pytest.raises(RewardError, match="segments of rollout 5 have the rewards 1 and 0"):
        normalize_group_rewards([1.0, 0.0], [0, 0], [5, 5])
