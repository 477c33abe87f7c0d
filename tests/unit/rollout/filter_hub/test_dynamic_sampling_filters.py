"""The zero-variance filter."""

from __future__ import annotations

import pytest

from tests.unit.rollout.support import make_args
from vime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from vime.utils.types import Sample


@pytest.mark.parametrize(
    ("rewards", "keep", "reason"),
    [([0.0, 1.0], True, None), ([1.0, 1.0], False, "zero_std_1.0"), ([0.3], False, "zero_std_0.3"), ([], False, "zero_std_empty")],
)
def test_only_groups_whose_rewards_differ_are_kept(rewards: list[float], keep: bool, reason: str | None) -> None:
    verdict = check_reward_nonzero_std(make_args(), [Sample(reward=reward) for reward in rewards])
    assert (verdict.keep, verdict.reason) == (keep, reason)


def test_a_dict_reward_is_read_by_its_key() -> None:
    samples = [Sample(reward={"score": 0.0, "acc": 1.0}), Sample(reward={"score": 1.0, "acc": 1.0})]
    assert check_reward_nonzero_std(make_args(reward_key="score"), samples).keep
    assert not check_reward_nonzero_std(make_args(reward_key="acc"), samples).keep
