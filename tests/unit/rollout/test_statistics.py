"""What the --log-... flags compute, against counting by hand."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import pytest

from tests.unit.rollout.support import make_args
from vime.errors import RewardError
from vime.rollout.statistics import pass_at_k, sample_statistics
from vime.utils.types import Sample


def sample(group: int, index: int, reward: Any, **fields: Any) -> Sample:
    """A finished sample of three tokens unless told otherwise."""
    base = {"tokens": [1, 2, 3, 4], "response_length": 3, "rollout_log_probs": [-1.0, -2.0, -3.0]}
    return Sample(group_index=group, index=index, reward=reward, status=Sample.Status.COMPLETED, **(base | fields))


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample() -> None:
    for total, correct in itertools.product((4, 5), range(5)):
        marks = [True] * correct + [False] * (total - correct)
        for k in (1, 2, 4):
            share = statistics.fmean(any(chosen) for chosen in itertools.combinations(marks, k))
            assert pass_at_k(total, correct, k) == pytest.approx(share, abs=1e-12)


def test_the_pass_rate_is_a_mean_over_groups_and_counts_executions() -> None:
    samples = [sample(0, 0, 1.0), sample(0, 1, 0.0), sample(1, 2, 0.0), sample(1, 3, 0.0)]
    samples += [sample(1, 4, 1.0, rollout_id=3), Sample(group_index=0, index=9, status=Sample.Status.FAILED)]
    assert sample_statistics(make_args(log_passrate=True), samples) == {"passrate/pass@1": 0.5, "passrate/pass@2": 1.0}


def test_turns_are_stretches_of_sampled_tokens_or_what_the_function_counted() -> None:
    samples = [sample(0, 0, 1.0, loss_mask=[1, 0, 1]), sample(0, 1, 1.0, metadata={"round_number": 5})]
    found = sample_statistics(make_args(log_multi_turn=True), samples)
    assert found["multi_turn/turns/mean"] == 3.5
    assert found["multi_turn/turns/min"] == 2.0
    assert found["multi_turn/response_length/max"] == 3.0
    assert found["multi_turn/sampled_length/mean"] == 2.5


def test_reward_categories_are_shares_and_must_be_there() -> None:
    samples = [sample(0, n, {"score": 1.0, "why": why}) for n, why in enumerate(["format", "sum", "sum", "sum"])]
    args = make_args(log_reward_category="why", reward_key="score")
    assert sample_statistics(args, samples) == {"rollout/error_cat/format": 0.25, "rollout/error_cat/sum": 0.75}
    with pytest.raises(RewardError, match=r"--log-reward-category why: the reward of sample 7 is 0\.5"):
        sample_statistics(args, [sample(0, 7, 0.5)])


def test_correct_samples_have_statistics_of_their_own() -> None:
    samples = [sample(0, 0, 1.0), sample(0, 1, 1.0, tokens=list(range(9)), response_length=8, rollout_log_probs=[-4.0] * 8)]
    samples += [sample(0, 2, 0.5), sample(0, 3, 0.0)]
    found = sample_statistics(make_args(log_correct_samples=True, rollout_max_response_len=8), samples)
    assert found == {
        "rollout/correct_samples": 0.5,
        "rollout/correct_response_lengths": 5.5,
        "rollout/correct_entropy": 3.0,
        "rollout/correct_length/p25": 0.0,
        "rollout/correct_length/p50": 0.5,
        "rollout/correct_length/p75": 0.0,
        "rollout/correct_length/p100": 0.5,
    }


def test_nothing_is_computed_that_was_not_asked_for() -> None:
    assert sample_statistics(make_args(), [sample(0, 0, 1.0)]) == {}
