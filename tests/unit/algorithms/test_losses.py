"""Policy loss, KL estimators and SFT loss against plain loops written from the papers; gradients by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from vime.algorithms import kl
from vime.algorithms.ppo_clip import clipped_policy_loss
from vime.algorithms.registry import KL_ESTIMATORS
from vime.algorithms.sft import negative_log_likelihood

NEW = [-1.0, -0.2, -3.0, -0.5, -2.0, -0.1, -5.0, -0.7]
OLD = [-1.1, -0.9, -1.0, -0.5, -0.4, -3.1, -2.0, -0.9]
ADVANTAGES = [1.0, 2.0, -1.0, 0.0, 1.5, -2.0, -0.5, -1.0]


def surrogate(new: float, old: float, advantage: float, low: float, high: float, c: float | None) -> tuple[float, float]:
    """PPO eq. 7 as a quantity to minimise, then the dual clip of arXiv:1912.09729 eq. 5."""
    ratio = math.exp(new - old)
    clipped = min(max(ratio, 1 - low), 1 + high)
    objective = min(ratio * advantage, clipped * advantage)
    decided = clipped * advantage < ratio * advantage
    if c is not None and advantage < 0:
        objective = max(objective, c * advantage)
    return -objective, float(decided)


@pytest.mark.parametrize(("low", "high", "c"), [(0.2, None, None), (0.2, 0.28, None), (0.2, 0.28, 3.0), (0.0, 0.5, 1.5)])
def test_policy_loss_equals_the_papers_formula(low: float, high: float | None, c: float | None) -> None:
    loss, clipped = clipped_policy_loss(
        torch.tensor(NEW, dtype=torch.float64),
        torch.tensor(OLD, dtype=torch.float64),
        torch.tensor(ADVANTAGES, dtype=torch.float64),
        eps_clip=low,
        eps_clip_high=high,
        eps_clip_c=c,
    )
    expected = [surrogate(n, o, a, low, low if high is None else high, c) for n, o, a in zip(NEW, OLD, ADVANTAGES, strict=True)]
    torch.testing.assert_close(loss, torch.tensor([e[0] for e in expected], dtype=torch.float64), rtol=0, atol=1e-12)
    assert clipped.tolist() == [e[1] for e in expected]
    assert 0 < sum(clipped.tolist()) < len(NEW)


@pytest.mark.parametrize("c", [None, 3.0])
def test_policy_loss_gradient(c: float | None) -> None:
    new = torch.tensor(NEW, dtype=torch.float64, requires_grad=True)
    old, advantages = torch.tensor(OLD, dtype=torch.float64), torch.tensor(ADVANTAGES, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: clipped_policy_loss(x, old, advantages, eps_clip=0.2, eps_clip_high=0.3, eps_clip_c=c)[0], new
    )


def test_at_ratio_1_the_gradient_is_the_plain_policy_gradient() -> None:
    new = torch.tensor(NEW, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    loss, clipped = clipped_policy_loss(new, new.detach(), advantages, eps_clip=0.2)
    loss.sum().backward()
    torch.testing.assert_close(new.grad, -advantages)
    assert clipped.sum() == 0


PLAIN_KL: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "low_var_kl": lambda d: min(max(math.exp(-d) - 1 + d, -10.0), 10.0),
}


@pytest.mark.parametrize("name", list(KL_ESTIMATORS))
def test_kl_estimators_equal_their_definition_and_differentiate(name: str) -> None:
    new = torch.tensor(NEW, dtype=torch.float64, requires_grad=True)
    old = torch.tensor(OLD, dtype=torch.float64)
    got = KL_ESTIMATORS[name](new, old)
    expected = [PLAIN_KL[name](n - o) for n, o in zip(NEW, OLD, strict=True)]
    torch.testing.assert_close(got.detach(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: KL_ESTIMATORS[name](x, old), new)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_weighted_kl_has_the_gradient_of_the_true_divergence_on_an_older_policys_samples(name: str) -> None:
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    old = torch.log_softmax(torch.tensor([0.0, 0.4, 0.2], dtype=torch.float64), 0)
    reference = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5], dtype=torch.float64), 0)
    new = torch.log_softmax(logits, 0)
    weighted = (old.exp() * kl.unbiased(KL_ESTIMATORS[name](new, reference), new, old)).sum()
    true = (new.exp() * (new - reference)).sum()
    assert weighted.item() == pytest.approx(true.item(), abs=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (weighted, true)), rtol=0, atol=1e-12)


def test_k1_and_k3_average_to_the_true_divergence() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    true = float((p * (p / q).log()).sum())
    for estimator in (kl.k1, kl.k3):
        assert float((p * estimator(p.log(), q.log())).sum()) == pytest.approx(true, abs=1e-12)


def test_low_var_kl_is_bounded_where_k3_is_not() -> None:
    new, ref = torch.tensor([-20.0]), torch.tensor([0.0])
    assert kl.k3(new, ref).item() > 1e8
    assert kl.low_var_kl(new, ref).item() == 10.0


def test_sft_loss_is_the_negative_log_likelihood() -> None:
    assert negative_log_likelihood(torch.tensor([-0.5, -2.0])).tolist() == [0.5, 2.0]
