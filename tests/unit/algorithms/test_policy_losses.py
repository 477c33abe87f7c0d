"""GSPO, CISPO, importance weights, rejection, off-policy masks, value loss: loops from the papers; gradients by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from vime.algorithms.cispo import clipped_weight_loss
from vime.algorithms.distillation import distilled_advantages
from vime.algorithms.importance import LEVELS, importance_weights, kept_tokens
from vime.algorithms.opsm import off_policy_mask
from vime.algorithms.overlong import overlong_penalty
from vime.algorithms.policy_losses import clipped_ratio, clipped_sequence_ratio, clipped_weight
from vime.algorithms.sequences import Sequences
from vime.algorithms.value_loss import clipped_value_loss
from vime.config.sections import AlgorithmConfig

# three sequences of 3, 4 and 2 tokens and one position of none; the second token is not trained, and sequence 2 not at all
IDS = [0, 0, 0, 1, 1, 1, 1, 2, 2, -1]
MASK = [1, 0, 1, 1, 1, 1, 1, 0, 0, 0]
SEQUENCES = Sequences(ids=torch.tensor(IDS), mask=torch.tensor(MASK, dtype=torch.float32), count=3)
NEW = [-1.0, -0.2, -1.6, -0.5, -1.9, -0.1, -1.5, -0.7, -0.3, 0.0]
OLD = [-1.1, -0.9, -1.0, -0.9, -1.4, -1.1, -1.7, -0.9, -0.2, 0.0]
ADVANTAGES = [1.0, 1.0, 1.0, -2.0, -2.0, -2.0, -2.0, 0.5, 0.5, 0.0]


def double(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def members(t: int) -> list[int]:
    """The trained positions of t's sequence."""
    return [u for u in range(len(IDS)) if IDS[u] == IDS[t] and MASK[u] and IDS[t] >= 0]


def log_ratio_at(level: str, t: int) -> float:
    """log w of position t at a level."""
    found = [NEW[u] - OLD[u] for u in members(t)]
    if level == "token":
        return NEW[t] - OLD[t]
    return sum(found) if level == "sequence" else sum(found) / max(len(found), 1)


def clip_loss(ratio: float, advantage: float, algorithm: AlgorithmConfig) -> tuple[float, float]:
    high = algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high
    bounded = min(max(ratio, 1 - algorithm.eps_clip), 1 + high)
    loss = -min(ratio * advantage, bounded * advantage)
    if algorithm.eps_clip_c is not None and advantage < 0:
        loss = min(loss, -algorithm.eps_clip_c * advantage)
    return loss, float(bounded * advantage < ratio * advantage)


def gspo(t: int, algorithm: AlgorithmConfig) -> tuple[float, float]:
    """arXiv:2507.18071, eqs. 5 and 7."""
    return clip_loss(math.exp(log_ratio_at("geometric", t)), ADVANTAGES[t], algorithm)


def grpo(t: int, algorithm: AlgorithmConfig) -> tuple[float, float]:
    return clip_loss(math.exp(NEW[t] - OLD[t]), ADVANTAGES[t], algorithm)


def cispo(t: int, algorithm: AlgorithmConfig) -> tuple[float, float]:
    """arXiv:2506.13585, eqs. 4 and 5."""
    high = algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high
    ratio = math.exp(NEW[t] - OLD[t])
    weight = min(max(ratio, 1 - algorithm.eps_clip), 1 + high)
    return -weight * ADVANTAGES[t] * NEW[t], float(weight != ratio)


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(),
        AlgorithmConfig(eps_clip=0.02, eps_clip_high=0.3),
        AlgorithmConfig(eps_clip=1.0, eps_clip_high=0.1, eps_clip_c=1.05),
    ],
    ids=["symmetric", "higher", "dual"],
)
@pytest.mark.parametrize(
    ("loss_of", "plain"), [(clipped_ratio, grpo), (clipped_sequence_ratio, gspo), (clipped_weight, cispo)], ids=["grpo", "gspo", "cispo"]
)
def test_surrogates_equal_the_papers_formulas(
    loss_of: Callable[..., torch.Tensor], plain: Callable[..., float], algorithm: AlgorithmConfig
) -> None:
    loss, clipped, _ = loss_of(double(NEW), double(OLD), double(ADVANTAGES), SEQUENCES, algorithm)
    trained = [t for t in range(len(IDS)) if MASK[t]]
    for t in trained:
        expected, decided = plain(t, algorithm)  # type: ignore[misc]
        assert loss[t].item() == pytest.approx(expected, abs=1e-12)
        assert clipped[t].item() == decided
    new = double(NEW).requires_grad_()
    at = torch.tensor(trained)
    if loss_of is not clipped_weight:  # its weight takes no part in the gradient
        assert torch.autograd.gradcheck(lambda x: loss_of(x, double(OLD), double(ADVANTAGES), SEQUENCES, algorithm)[0][at], new)


def test_each_token_of_a_sequence_gets_gspos_gradient() -> None:
    """arXiv:2507.18071, eq. 10: s_i A_i times the mean of the tokens' score functions, where nothing is clipped."""
    new = double(NEW).requires_grad_()
    loss, _, _ = clipped_sequence_ratio(new, double(OLD), double(ADVANTAGES), SEQUENCES, AlgorithmConfig(eps_clip=10.0))
    (loss[2] + loss[3]).backward()
    for t in range(len(IDS)):
        s = math.exp(log_ratio_at("geometric", t))
        expected = -ADVANTAGES[t] * s / len(members(t)) if t in members(2) + members(3) else 0.0
        assert new.grad is not None
        assert new.grad[t].item() == pytest.approx(expected, abs=1e-12)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    new = double(NEW).requires_grad_()
    loss, clipped = clipped_weight_loss(new, double(OLD), double(ADVANTAGES), eps_clip=0.1)
    loss.sum().backward()
    weights = [min(max(math.exp(n - o), 0.9), 1.1) for n, o in zip(NEW, OLD, strict=True)]
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-w * a for w, a in zip(weights, ADVANTAGES, strict=True)], abs=1e-12)
    assert clipped.sum() > 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["clip", "mask"])
def test_importance_weights_equal_their_definition(level: str, mode: str) -> None:
    log_ratio = (double(NEW) - double(OLD)).requires_grad_()
    weights, outside = importance_weights(log_ratio, SEQUENCES, level=level, mode=mode, low=0.8, high=1.25)
    assert not weights.requires_grad
    for t in (t for t in range(len(IDS)) if MASK[t]):
        w = math.exp(log_ratio_at(level, t))
        expected = min(max(w, 0.8), 1.25) if mode == "clip" else w if 0.8 <= w <= 1.25 else 0.0
        assert weights[t].item() == pytest.approx(expected, abs=1e-12)
        assert outside[t].item() == float(not 0.8 <= w <= 1.25)


def test_weights_of_long_sequences_do_not_overflow() -> None:
    n = 5000
    sequences = Sequences(ids=torch.zeros(n, dtype=torch.int64), mask=torch.ones(n), count=1)
    assert importance_weights(torch.ones(n), sequences, level="sequence")[0].max() == 2.0
    assert importance_weights(torch.ones(n), sequences, level="sequence", mode="mask")[0].max() == 0.0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("veto", [None, 0.56])
def test_rejection_keeps_what_is_inside_the_bounds(level: str, veto: float | None) -> None:
    kept = kept_tokens(double(NEW) - double(OLD), SEQUENCES, level=level, low=0.8, high=2.0, veto=veto)
    for t in (t for t in range(len(IDS)) if MASK[t]):
        inside = 0.8 <= math.exp(log_ratio_at(level, t)) <= 2.0
        vetoed = veto is not None and any(math.exp(NEW[u] - OLD[u]) < veto for u in members(t))
        assert kept[t].item() == float(inside and not vetoed)
    assert 0 < sum(kept[t].item() for t in range(len(IDS)) if MASK[t]) < sum(MASK) or level == "sequence"


@pytest.mark.parametrize("delta", [0.0, 0.1, 0.5])
def test_the_off_policy_mask_takes_bad_sequences_that_drifted(delta: float) -> None:
    behaviour = [b + 0.4 for b in OLD]
    got = off_policy_mask(double(NEW), double(behaviour), double(ADVANTAGES), SEQUENCES, delta=delta)
    for t in range(len(IDS)):
        drift = sum(behaviour[u] - NEW[u] for u in members(t)) / max(len(members(t)), 1)
        assert got[t].item() == float(not (ADVANTAGES[t] < 0 and drift > delta))


@pytest.mark.parametrize("clip", [0.0, 0.2, 5.0])
def test_the_value_loss_is_the_larger_of_both_errors(clip: float) -> None:
    values, old, returns = [0.1, 1.0, -2.0, 0.5], [0.0, 0.5, -1.0, 0.9], [0.3, -1.0, 0.0, 0.45]
    loss, clipped = clipped_value_loss(double(values), double(old), double(returns), value_clip=clip)
    for t, (v, o, g) in enumerate(zip(values, old, returns, strict=True)):
        bounded = min(max(v, o - clip), o + clip)
        assert loss[t].item() == pytest.approx(max((v - g) ** 2, (bounded - g) ** 2), abs=1e-12)
        assert clipped[t].item() == float((bounded - g) ** 2 > (v - g) ** 2)
    leaf = double(values).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, double(old), double(returns), value_clip=clip)[0], leaf)


def test_distillation_adds_the_reverse_divergence_of_each_token() -> None:
    got = distilled_advantages(double([1.0, 0.0]), double([-1.0, -2.0]), double([-0.5, -4.0]), 0.5)
    assert got.tolist() == [1.0 - 0.5 * (-1.0 + 0.5), -0.5 * (-2.0 + 4.0)]


def test_the_distillation_gradient_is_that_of_the_reverse_divergence() -> None:
    """On the student's own samples: E[A(y) grad log pi(y)] with A = -(log pi - log teacher) is -grad KL(pi || teacher)."""
    logits = double([0.3, -1.0, 0.8]).requires_grad_()
    teacher = torch.log_softmax(double([1.0, 0.2, -0.5]), 0)
    log_pi = torch.log_softmax(logits, 0)
    advantages = distilled_advantages(torch.zeros(3, dtype=torch.float64), log_pi.detach(), teacher, 1.0)
    (ours,) = torch.autograd.grad(-(log_pi.exp().detach() * advantages * log_pi).sum(), logits, retain_graph=True)
    (true,) = torch.autograd.grad((log_pi.exp() * (log_pi - teacher)).sum(), logits)
    torch.testing.assert_close(ours, true, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (140, -1.0)])
def test_overlong_responses_lose_linearly(length: int, expected: float) -> None:
    assert overlong_penalty(length, max_length=100, margin=20) == pytest.approx(expected)
