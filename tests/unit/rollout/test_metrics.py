"""Metrics of an evaluation: means with an interval, pass@k."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from vime.rollout.metrics import clustered_standard_error, eval_metrics
from vime.utils.types import Sample


def answers(*groups: list[float]) -> tuple[list[float], list[Sample]]:
    """Rewards, prompt by prompt, and their samples."""
    flat = [(number, reward) for number, group in enumerate(groups) for reward in group]
    return [reward for _, reward in flat], [Sample(group_index=number, response_length=3) for number, _ in flat]


def test_with_one_answer_a_prompt_the_error_is_that_of_a_mean() -> None:
    values = np.random.default_rng(0).random(50)
    assert clustered_standard_error([[value] for value in values]) == pytest.approx(values.std(ddof=1) / np.sqrt(50), rel=1e-12)


def test_answering_again_in_the_same_way_makes_nothing_surer() -> None:
    values = np.random.default_rng(1).random(20)
    once = clustered_standard_error([[value] for value in values])
    assert clustered_standard_error([[value] * 8 for value in values]) == pytest.approx(once, rel=1e-12)


def test_the_error_is_the_spread_of_means_over_draws_of_prompts() -> None:
    """Against 4000 evaluations of 40 new prompts with 4 answers each; 3 %: the error of a spread from 4000 draws is 1.1 %."""
    draws = np.random.default_rng(2)
    solved = draws.beta(0.5, 0.5, size=(4000, 40))
    rewards = (draws.random((4000, 40, 4)) < solved[..., None]).astype(float)
    spread = rewards.mean(axis=(1, 2)).std()
    errors = [clustered_standard_error(evaluation.tolist()) for evaluation in rewards[:400]]
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(spread, rel=0.03)


def test_an_evaluation_tells_mean_interval_and_pass_at_k_as_counted_by_hand() -> None:
    groups = ([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0] * 4)
    metrics = eval_metrics("sums", *answers(*groups), num_failed=2)
    assert metrics["eval/sums"] == 0.25
    assert metrics["eval/sums-failed"] == 2.0
    assert metrics["eval/sums-ci95"] == pytest.approx(1.96 * np.std([0.25, 0.5, 0.0], ddof=1) / np.sqrt(3))
    for k in (1, 2, 4):
        rates = [np.mean([max(chosen) for chosen in itertools.combinations(group, k)]) for group in groups]
        assert metrics[f"eval/sums-pass@{k}"] == pytest.approx(np.mean(rates))
    assert "eval/sums-pass@8" not in metrics


def test_one_prompt_has_no_interval_and_one_answer_no_pass_rate() -> None:
    metrics = eval_metrics("sums", *answers([1.0]), num_failed=0)
    assert set(metrics) == {"eval/sums", "eval/sums-truncated_ratio", "eval/sums-failed"} | {
        f"eval/sums-response_len/{kind}" for kind in ("mean", "median", "max", "min")
    }
