"""Comparisons inside a group against plain loops written from the papers, and their edge cases."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vime.algorithms.group_norm import COMPARISONS, normalize_group_rewards
from vime.errors import RewardError


def by_hand(rewards: list[float], groups: list[int], comparison: str) -> list[float]:
    """By loops over the other members of each group."""
    out = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        same = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        mean = sum(same) / len(same)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in same) / (len(same) - 1)) if len(same) > 1 else 0.0
        if comparison == "leave_one_out":
            out.append(reward - sum(others) / len(others) if others else 0.0)
        else:
            out.append((reward - mean) / (deviation + 1e-6) if comparison == "mean_std" and len(same) > 1 else reward - mean)
    return out


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_uneven_groups_each_use_their_own_statistics(comparison: str) -> None:
    rewards = [1.0, 0.0, 0.5, 1.0, 3.0, -2.0, 0.25, 9.0]
    groups = [7, 7, 9, 9, 9, 9, 7, 8]
    got = normalize_group_rewards(rewards, groups, list(range(8)), comparison=comparison)
    np.testing.assert_allclose(got, by_hand(rewards, groups, comparison), rtol=0, atol=1e-12)


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_segments_of_one_rollout_count_once_and_share_the_value(comparison: str) -> None:
    got = normalize_group_rewards([1.0, 1.0, 1.0, 0.0, 0.5], [0] * 5, [5, 5, 5, 6, 7], comparison=comparison)
    plain = normalize_group_rewards([1.0, 0.0, 0.5], [0] * 3, [5, 6, 7], comparison=comparison)
    np.testing.assert_array_equal(got, [plain[0], plain[0], plain[0], plain[1], plain[2]])


def test_order_of_samples_does_not_matter() -> None:
    rewards, groups = [1.0, 0.0, 4.0, 2.0], [0, 1, 0, 1]
    got = normalize_group_rewards(rewards, groups, [0, 1, 2, 3])
    turned = normalize_group_rewards(rewards[::-1], groups[::-1], [3, 2, 1, 0])
    np.testing.assert_allclose(got, turned[::-1], rtol=0, atol=1e-15)


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_equal_rewards_and_a_lone_rollout_give_zero(comparison: str) -> None:
    np.testing.assert_allclose(normalize_group_rewards([0.1] * 6, [0] * 6, list(range(6)), comparison=comparison), 0.0, atol=1e-9)
    assert normalize_group_rewards([3.0], [0], [0], comparison=comparison).tolist() == [0.0]


def test_segments_with_different_rewards_are_refused() -> None:
    with pytest.raises(RewardError, match="segments of rollout 5 have the rewards 1 and 0"):
        normalize_group_rewards([1.0, 0.0], [0, 0], [5, 5])
