"""Advantages: broadcast over the response, whitening over all ranks' trained tokens, and the registry."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vime.algorithms.advantages import compute_advantages
from vime.algorithms.registry import ADVANTAGES, KL_ESTIMATORS
from vime.algorithms.whitening import masked_sums, whiten
from vime.config.fields import flag_specs
from vime.config.sections import AlgorithmConfig
from vime.types import TrainSample


def sample(reward: float, mask: list[int]) -> TrainSample:
    """A sample with a prompt of two tokens."""
    return TrainSample(
        tokens=np.arange(len(mask) + 2),
        response_length=len(mask),
        loss_mask=np.array(mask, dtype=np.float32),
        reward=reward,
        raw_reward=reward,
        sample_id=0,
        group_id=0,
        rollout_id=0,
        rollout_mask_sum=float(sum(mask)),
    )


def test_the_reward_lies_on_every_token_of_the_response() -> None:
    got = compute_advantages([sample(0.5, [1, 1]), sample(-2.0, [1, 0, 1])], AlgorithmConfig())
    assert [a.tolist() for a in got] == [[0.5, 0.5], [-2.0, -2.0, -2.0]]


def test_whitened_advantages_have_mean_0_and_variance_1_over_trained_tokens() -> None:
    samples = [sample(0.5, [1, 1]), sample(-2.0, [1, 0, 1]), sample(3.0, [0, 1])]
    got = torch.cat(compute_advantages(samples, AlgorithmConfig(normalize_advantages=True)))
    mask = np.concatenate([s.loss_mask for s in samples]).astype(bool)
    flat = np.concatenate([np.full(s.response_length, s.reward) for s in samples])
    trained = flat[mask]
    expected = (flat - trained.mean()) / np.sqrt(trained.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=1e-6)
    assert abs(got.numpy()[mask].mean()) < 1e-6


def test_whitening_over_two_ranks_equals_whitening_of_the_whole() -> None:
    samples = [sample(0.5, [1, 1]), sample(-2.0, [1, 0, 1]), sample(3.0, [0, 1])]
    algorithm = AlgorithmConfig(normalize_advantages=True)
    whole = compute_advantages(samples, algorithm)
    parts = [samples[:1], samples[1:]]
    sums = [
        masked_sums(torch.cat([torch.full((s.response_length,), s.reward) for s in p]), torch.cat([torch.tensor(s.loss_mask) for s in p]))
        for p in parts
    ]
    split = [a for p in parts for a in compute_advantages(p, algorithm, sum_over_ranks=lambda mine: sums[0] + sums[1])]
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_a_rank_without_samples_still_takes_part_in_whitening() -> None:
    seen = []
    compute_advantages([], AlgorithmConfig(normalize_advantages=True), sum_over_ranks=lambda sums: seen.append(sums) or sums)
    assert seen[0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("mask", "expected"), [([0.0, 0.0], [2.0, 4.0]), ([0.0, 1.0], [-2.0, 0.0])])
def test_fewer_than_two_trained_tokens_are_only_shifted(mask: list[float], expected: list[float]) -> None:
    values = torch.tensor([2.0, 4.0])
    assert whiten(values, masked_sums(values, torch.tensor(mask))).tolist() == expected


def test_the_registry_and_the_flags_choices_agree() -> None:
    choices = {spec.name: set(spec.choices or ()) - set(spec.choices_not_yet or ()) for spec in flag_specs(AlgorithmConfig)}
    assert choices["advantage_estimator"] == set(ADVANTAGES)
    assert choices["kl_loss_type"] == set(KL_ESTIMATORS)
