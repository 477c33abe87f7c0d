"""Advantages of each estimator against loops over samples and tokens, whitening over ranks, and the registry."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from vime.algorithms.advantages import compute_advantages
from vime.algorithms.group_norm import COMPARISONS
from vime.algorithms.registry import ADVANTAGES, KL_ESTIMATORS
from vime.algorithms.whitening import masked_sums, whiten
from vime.config.estimators import ESTIMATORS
from vime.config.fields import flag_specs
from vime.config.sections import AlgorithmConfig
from vime.types import TrainSample

MASKS = [[1, 1], [1, 0, 1, 1], [0, 0], [], [0, 1, 1, 0, 1]]
REWARDS = [0.5, -2.0, 1.0, 4.0, 0.25]


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


SAMPLES = [sample(r, m) for r, m in zip(REWARDS, MASKS, strict=True)]


def made(seed: int) -> list[torch.Tensor]:
    """One [R] tensor a sample."""
    rng = np.random.default_rng(seed)
    return [torch.tensor(-3 * rng.random(len(mask)), dtype=torch.float32) for mask in MASKS]


def flat(per_sample: list[torch.Tensor]) -> list[float]:
    return [x for values in per_sample for x in values.tolist()]


def plain(algorithm: AlgorithmConfig) -> tuple[list[list[float]], list[list[float]]]:
    """The definitions by loops: time goes over trained tokens only, everything else is 0."""
    policy, reference, teacher, values = made(1), made(2), made(3), made(4)
    advantages, returns = [], []
    for i, (reward, mask) in enumerate(zip(REWARDS, MASKS, strict=True)):
        at = [t for t in range(len(mask)) if mask[t]]
        kl = [policy[i][t].item() - reference[i][t].item() for t in at]
        reward_of = [-algorithm.kl_coef * k for k in kl]
        if at:
            reward_of[-1] += reward
        v = [values[i][t].item() for t in at]
        a, g = [0.0] * len(mask), [0.0] * len(mask)
        for n, t in enumerate(at):
            later = range(n, len(at))
            discounted = sum(algorithm.gamma ** (k - n) * reward_of[k] for k in later)
            if algorithm.advantage_estimator == "reinforce_plus_plus":
                a[t] = g[t] = discounted
            elif algorithm.advantage_estimator == "reinforce_plus_plus_baseline":
                a[t] = g[t] = reward - algorithm.kl_coef * kl[n]
            elif algorithm.advantage_estimator == "ppo":
                delta = [reward_of[k] + algorithm.gamma * (v[k + 1] if k + 1 < len(at) else 0.0) - v[k] for k in range(len(at))]
                a[t] = sum((algorithm.gamma * algorithm.lambd) ** (k - n) * delta[k] for k in later)
                g[t] = a[t] + v[n]
            else:
                a[t] = g[t] = reward
            if algorithm.use_opd:
                a[t] -= algorithm.opd_kl_coef * (policy[i][t].item() - teacher[i][t].item())
        advantages.append(a)
        returns.append(g)
    if algorithm.normalize_advantages:
        trained = [a for row, mask in zip(advantages, MASKS, strict=True) for a, m in zip(row, mask, strict=True) if m]
        mean = sum(trained) / len(trained)
        variance = sum((a - mean) ** 2 for a in trained) / (len(trained) - 1)
        advantages = [
            [(a - mean) / math.sqrt(variance + 1e-8) if m else 0.0 for a, m in zip(row, mask, strict=True)]
            for row, mask in zip(advantages, MASKS, strict=True)
        ]
    return advantages, returns


@pytest.mark.parametrize("opd", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_advantages_and_returns_equal_loops_over_tokens(name: str, normalize: bool, opd: bool) -> None:
    algorithm = AlgorithmConfig(
        advantage_estimator=name, normalize_advantages=normalize, use_opd=opd, opd_kl_coef=0.3, gamma=0.9, lambd=0.8
    )
    if ESTIMATORS[name].token_kl:
        algorithm = replace(algorithm, kl_coef=0.2)
    got = compute_advantages(
        SAMPLES, algorithm, log_probs=made(1), ref_log_probs=made(2), teacher_log_probs=made(3), values=made(4) if name == "ppo" else None
    )
    for ours, expected in zip(got, plain(algorithm), strict=True):
        assert [len(values) for values in ours] == [len(mask) for mask in MASKS]
        np.testing.assert_allclose(flat(ours), [x for row in expected for x in row], rtol=0, atol=1e-6)


def test_whitened_advantages_have_mean_0_and_variance_1_over_trained_tokens() -> None:
    got = np.array(flat(compute_advantages(SAMPLES, AlgorithmConfig(normalize_advantages=True))[0]))
    trained = got[np.concatenate(MASKS).astype(bool)]
    assert abs(trained.mean()) < 1e-6
    assert trained.var(ddof=1) == pytest.approx(1.0, abs=1e-6)


def test_whitening_over_two_ranks_equals_whitening_of_the_whole() -> None:
    algorithm = AlgorithmConfig(normalize_advantages=True)
    whole, _ = compute_advantages(SAMPLES, algorithm)
    parts = [SAMPLES[:1], SAMPLES[1:]]
    plain_parts = [compute_advantages(p, AlgorithmConfig())[0] for p in parts]
    sums = [
        masked_sums(torch.cat(values), torch.cat([torch.tensor(s.loss_mask) for s in p]))
        for p, values in zip(parts, plain_parts, strict=True)
    ]
    split = [a for p in parts for a in compute_advantages(p, algorithm, sum_over_ranks=lambda mine: sums[0] + sums[1])[0]]
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


def test_what_the_settings_need_must_be_there() -> None:
    algorithm = AlgorithmConfig(advantage_estimator="ppo", kl_coef=0.1)
    with pytest.raises(ValueError, match="needs ref_log_probs"):
        compute_advantages(SAMPLES, algorithm, log_probs=made(1))


def test_the_registry_and_the_flags_agree() -> None:
    choices = {spec.name: spec.choices for spec in flag_specs(AlgorithmConfig)}
    assert choices["advantage_estimator"] == tuple(ADVANTAGES)
    assert choices["kl_loss_type"] == tuple(KL_ESTIMATORS)
    for name, estimator in ADVANTAGES.items():
        traits = ESTIMATORS[name]
        assert estimator.comparison in (None, *COMPARISONS)
        assert (traits.compares, traits.divides, traits.critic) == (
            estimator.comparison is not None,
            estimator.comparison == "mean_std",
            estimator.critic,
        )


@pytest.mark.parametrize("name", list(ADVANTAGES))
@pytest.mark.parametrize(("trait", "change"), [("token_kl", {"kl_coef": 0.5}), ("discounts", {"gamma": 0.5}), ("critic", {"lambd": 0.5})])
def test_a_knob_changes_the_advantages_exactly_where_the_rules_allow_it(name: str, trait: str, change: dict[str, float]) -> None:
    values = made(4) if ADVANTAGES[name].critic else None
    base, other = (
        flat(
            compute_advantages(
                SAMPLES, AlgorithmConfig(advantage_estimator=name, **c), log_probs=made(1), ref_log_probs=made(2), values=values
            )[0]
        )
        for c in ({}, change)
    )
    assert (base != other) == getattr(ESTIMATORS[name], trait)
