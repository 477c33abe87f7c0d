"""The formulas that CUDA devices get compiled, against autograd and the CPU's own; `tests/gpu` does the same to the kernels."""

from __future__ import annotations

import pytest
import torch

from vime.backends.megatron_utils.compiled import log_prob_grads, log_prob_sums, turn
from vime.backends.megatron_utils.fused import rotate

SCALE = 1 / 0.7


def test_sums_give_log_probs_and_entropies() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 40, dtype=torch.float64)
    peak = logits.amax(-1) * SCALE
    total, weighted = log_prob_sums(logits, peak, SCALE)
    wanted = (logits * SCALE).log_softmax(-1)
    assert torch.allclose(peak + total.log(), (logits * SCALE).logsumexp(-1), atol=1e-12)
    assert torch.allclose(total.log() - weighted / total, -(wanted.exp() * wanted).sum(-1), atol=1e-12)


@pytest.mark.parametrize("entropies_too", [False, True])
def test_gradients_are_autograds(entropies_too: bool) -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 30, dtype=torch.float64, requires_grad=True)
    labels, grad, grad_entropy = torch.randint(0, 30, (6,)), torch.randn(6).double(), torch.randn(6).double()
    log_p = (logits * SCALE).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    total = (log_p.gather(-1, labels[:, None]).squeeze(-1) * grad).sum() + ((entropy * grad_entropy).sum() if entropies_too else 0.0)
    (wanted,) = torch.autograd.grad(total, logits)
    lse = (logits * SCALE).logsumexp(-1)
    given = (lse.detach(), grad, entropy.detach(), grad_entropy if entropies_too else None)
    found = log_prob_grads(logits.detach(), labels, *given, SCALE)
    assert torch.allclose(found, wanted, atol=1e-12)
    elsewhere = log_prob_grads(logits.detach(), torch.full_like(labels, -1), *given, SCALE)
    assert torch.allclose(elsewhere.scatter_add(-1, labels[:, None], (grad * SCALE)[:, None]), wanted, atol=1e-12)


def test_turning_is_the_rotary_embedding_and_its_inverse() -> None:
    torch.manual_seed(2)
    x, angles = torch.randn(7, 2, 8), torch.rand(7, 1, 4) * 6
    cos, sin = torch.cat([angles, angles], -1).cos(), angles.sin()
    assert torch.allclose(turn(x, cos, sin, 1.0), rotate(x, cos, sin), atol=1e-6)
    assert torch.allclose(turn(turn(x, cos, sin, 1.0), cos, sin, -1.0), x, atol=1e-5)
