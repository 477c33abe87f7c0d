"""What an estimator starts from: rewards compared as it asks, uneven groups, fan-outs, failed and removed members; shaped for length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vime.algorithms.registry import ADVANTAGES
from vime.config.sections import AlgorithmConfig, RewardConfig
from vime.packing.convert import to_train_samples
from vime.utils.types import Sample


def sample(index: int, group: int, reward: float, *, rollout: int | None = None, length: int = 3, **fields: Any) -> Sample:
    return Sample(
        **{"index": index, "group_index": group, "rollout_id": rollout, "tokens": list(range(length + 2)), "response_length": length,
           "reward": reward, "status": Sample.Status.COMPLETED, **fields}
    )  # fmt: skip


# group 0: rollouts with 1, 0, 5 (removed) and a failed one; group 1: a fan-out of two segments with 2, and one with 4
SAMPLES = [
    sample(0, 0, 1.0),
    sample(1, 0, 0.0),
    sample(2, 0, 5.0, remove_sample=True),
    sample(3, 0, 9.0, status=Sample.Status.FAILED),
    sample(4, 1, 2.0, rollout=4),
    sample(5, 1, 2.0, rollout=4),
    sample(6, 1, 4.0),
]


def rewards(name: str, samples: list[Sample] = SAMPLES, reward: RewardConfig | None = None, **changes: Any) -> list[float]:
    algorithm = AlgorithmConfig(advantage_estimator=name, **changes)
    args = SimpleNamespace(reward_key=None, rollout_max_response_len=10)
    return [s.reward for s in to_train_samples(samples, algorithm=algorithm, reward=reward or RewardConfig(), args=args)]


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_each_estimator_compares_rewards_in_its_own_way(name: str) -> None:
    expected = {
        "mean_std": [(x - 2.0) / 7.0**0.5 for x in (1.0, 0.0, 5.0)] + [(x - 3.0) / 2.0**0.5 for x in (2.0, 2.0, 4.0)],
        "mean": [-1.0, -2.0, 3.0, -1.0, -1.0, 1.0],
        "leave_one_out": [1.0 - 2.5, 0.0 - 3.0, 5.0 - 0.5, -2.0, -2.0, 2.0],
        None: [1.0, 0.0, 5.0, 2.0, 2.0, 4.0],
    }[ADVANTAGES[name].comparison]
    assert rewards(name) == pytest.approx(expected, abs=1e-5)


def test_without_division_grpo_only_subtracts() -> None:
    assert rewards("grpo", grpo_std_normalization=False) == [-1.0, -2.0, 3.0, -1.0, -1.0, 1.0]


def test_without_normalisation_rewards_stay() -> None:
    assert rewards("rloo", rewards_normalization=False) == [1.0, 0.0, 5.0, 2.0, 2.0, 4.0]


def test_long_responses_lose_before_they_are_compared() -> None:
    samples = [sample(0, 0, 1.0, length=8), sample(1, 0, 1.0, length=10), sample(2, 0, 1.0, length=5)]
    shaping = RewardConfig(overlong_buffer_len=4, overlong_penalty_factor=0.5)
    assert rewards("ppo", samples, shaping) == [0.75, 0.5, 1.0]
    assert rewards("rloo", samples, shaping) == pytest.approx([0.0, -0.375, 0.375])


def test_the_segments_of_a_rollout_are_shaped_alike() -> None:
    samples = [sample(0, 0, 1.0, rollout=0, length=3), sample(1, 0, 1.0, rollout=0, length=10)]
    assert rewards("ppo", samples, RewardConfig(overlong_buffer_len=4)) == [0.0, 0.0]
