"""Rewards compared inside their group.

GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1.2): A_i = (r_i - mean(r)) / std(r) over the G outputs of one prompt.
Dr. GRPO (arXiv:2503.20783, section 3.2) leaves the division out, because it weighs easy and hard prompts differently.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vime.errors import RewardError

__all__ = ["normalize_group_rewards"]

EPSILON = 1e-6  # added to the standard deviation, as slime does


def normalize_group_rewards(
    rewards: Sequence[float],
    group_ids: Sequence[int],
    rollout_ids: Sequence[int],
    *,
    subtract_mean: bool = True,
    divide_std: bool = True,
) -> npt.NDArray[np.float64]:
    """Normalise [n] rewards with the statistics of each group's distinct rollouts; [n] float64.

    Samples that share a rollout id are segments of one rollout: they count once and get the same value. The standard
    deviation is the unbiased one (n - 1); a group of one rollout has none and is not divided. Groups may differ in size.
    `divide_std` without `subtract_mean` has no effect: the rewards stay as they are (slime's meaning of the flags).
    Raises RewardError when segments of one rollout differ in reward.
    """
    out = np.asarray(rewards, dtype=np.float64).copy()
    if not subtract_mean:
        return out
    members: dict[int, dict[int, float]] = {}
    for reward, group, rollout in zip(rewards, group_ids, rollout_ids, strict=True):
        first = members.setdefault(group, {}).setdefault(rollout, float(reward))
        if first != float(reward):
            raise RewardError(
                f"group {group}: segments of rollout {rollout} have the rewards {first:g} and {float(reward):g}; segments of one "
                "rollout share its reward. Give them one reward, or rollout ids of their own, or --custom-reward-post-process-path."
            )
    statistics = {group: _statistics(np.array(list(of.values())), divide_std) for group, of in members.items()}
    for position, group in enumerate(group_ids):
        mean, scale = statistics[group]
        out[position] = (out[position] - mean) / scale
    return out


def _statistics(rewards: npt.NDArray[np.float64], divide_std: bool) -> tuple[float, float]:
    """Mean, and what to divide by."""
    mean = float(rewards.mean())
    if not divide_std or len(rewards) == 1:
        return mean, 1.0
    return mean, float(rewards.std(ddof=1)) + EPSILON
