"""Rewards compared inside their group.

mean_std       A_i = (r_i - mean(r)) / std(r) over the G outputs of one prompt: GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1.2)
mean           A_i = r_i - mean(r): Dr. GRPO (arXiv:2503.20783, section 3.2), because the division weighs easy and hard prompts differently
leave_one_out  A_i = r_i - mean of the others' r: RLOO (arXiv:2402.14740, section 3.2), a baseline that does not depend on i's own output
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vime.errors import RewardError

__all__ = ["COMPARISONS", "normalize_group_rewards"]

COMPARISONS = ("mean_std", "mean", "leave_one_out")
EPSILON = 1e-6  # added to the standard deviation, as slime does


def normalize_group_rewards(
    rewards: Sequence[float], group_ids: Sequence[int], rollout_ids: Sequence[int], *, comparison: str = "mean_std"
) -> npt.NDArray[np.float64]:
    """Compare [n] rewards with those of each group's distinct rollouts; [n] float64.

    Samples that share a rollout id are segments of one rollout: they count once and get the same value. The standard
    deviation is the unbiased one (n - 1); a group of one rollout gets 0. Groups may differ in size. `comparison` is one of COMPARISONS.
    Raises RewardError when segments of one rollout differ in reward.
    """
    out = np.asarray(rewards, dtype=np.float64).copy()
    members: dict[int, dict[int, float]] = {}
    for reward, group, rollout in zip(rewards, group_ids, rollout_ids, strict=True):
        first = members.setdefault(group, {}).setdefault(rollout, float(reward))
        if first != float(reward):
            raise RewardError(
                f"group {group}: segments of rollout {rollout} have the rewards {first:g} and {float(reward):g}; segments of one "
                "rollout share its reward. Give them one reward, or rollout ids of their own, or --custom-reward-post-process-path."
            )
    statistics = {group: _statistics(np.array(list(of.values())), comparison) for group, of in members.items()}
    for position, group in enumerate(group_ids):
        mean, scale = statistics[group]
        out[position] = (out[position] - mean) / scale
    return out


def _statistics(rewards: npt.NDArray[np.float64], comparison: str) -> tuple[float, float]:
    """Mean, and what to divide by."""
    mean, count = float(rewards.mean()), len(rewards)
    if comparison == "mean" or count == 1:
        return mean, 1.0
    if comparison == "leave_one_out":
        return mean, (count - 1) / count  # r - (n mean - r) / (n - 1) = (r - mean) n / (n - 1)
    return mean, float(rewards.std(ddof=1)) + EPSILON
