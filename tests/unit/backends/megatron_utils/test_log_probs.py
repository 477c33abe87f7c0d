"""Log-probs and entropies of a whole vocabulary against torch.log_softmax; exact gradients; no large float32 copy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vime.backends.megatron_utils.log_probs import token_log_probs
from vime.backends.megatron_utils.loss import loss_from_logits
from vime.config.sections import AlgorithmConfig
from vime.packing.pack import KeptTokens, pack
from vime.types import StepPlan, TrainSample


def plain(logits: torch.Tensor, labels: torch.Tensor, temperature: float, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition."""
    log_p = torch.log_softmax(logits[:, :vocab_size] / temperature, -1)
    return log_p.gather(-1, labels[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def problem(dtype: torch.dtype, count: int = 9, width: int = 16, vocab_size: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with a wide range, and labels inside the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(count, width, generator=generator, dtype=torch.float64)).to(dtype)
    return logits, torch.randint(0, vocab_size, (count,), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_rows", [None, 1, 4])
@pytest.mark.parametrize("vocab_size", [13, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_log_softmax(temperature: float, chunk_rows: int | None, vocab_size: int, dtype: torch.dtype) -> None:
    logits, labels = problem(dtype)
    log_probs, entropy = token_log_probs(
        logits, labels, temperature=temperature, vocab_size=vocab_size, with_entropy=True, chunk_rows=chunk_rows
    )
    expected, expected_entropy = plain(logits.double(), labels, temperature, vocab_size)
    assert log_probs.dtype == torch.float32
    assert entropy is not None
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [None, torch.tensor([0, 3, 4, 8])])
def test_gradients_by_finite_differences(rows: torch.Tensor | None) -> None:
    logits, labels = problem(torch.float64)
    logits.requires_grad_()

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return token_log_probs(x, labels, temperature=0.7, vocab_size=13, rows=rows, with_entropy=True, entropy_grad=True, chunk_rows=2)

    assert torch.autograd.gradcheck(both, logits)
    assert torch.autograd.gradcheck(lambda x: token_log_probs(x, labels, vocab_size=13, rows=rows)[0], logits)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_gradients_equal_autograds_of_log_softmax(dtype: torch.dtype, tolerance: float) -> None:
    logits, labels = problem(dtype)
    weight = torch.randn(len(labels), generator=torch.Generator().manual_seed(1))
    mine, theirs = logits.clone().requires_grad_(), logits.float().requires_grad_()
    log_probs, entropy = token_log_probs(mine, labels, vocab_size=13, with_entropy=True, entropy_grad=True)
    expected, expected_entropy = plain(theirs, labels, 1.0, 13)
    assert entropy is not None
    ((log_probs + 0.3 * entropy) * weight).sum().backward()
    ((expected + 0.3 * expected_entropy) * weight).sum().backward()
    assert mine.grad is not None
    assert mine.grad.dtype == dtype
    torch.testing.assert_close(mine.grad.float(), theirs.grad, rtol=tolerance, atol=tolerance)


def test_chosen_rows_equal_the_whole_and_the_others_are_0() -> None:
    logits, labels = problem(torch.float32)
    whole, _ = token_log_probs(logits, labels)
    some, entropy = token_log_probs(logits, labels, rows=torch.tensor([2, 5]), with_entropy=True)
    assert entropy is not None
    assert torch.equal(some[[2, 5]], whole[[2, 5]])
    assert some.count_nonzero() == entropy.count_nonzero() == 2


@pytest.mark.parametrize("rows", [None, torch.tensor([0, 3, 4, 8])])
def test_kept_tokens_are_all_that_a_position_chooses_from(rows: torch.Tensor | None) -> None:
    """As if the other logits were -inf; position 3 keeps the whole vocabulary; gradients by finite differences."""
    logits, labels = problem(torch.float64)
    sets = [[] if at == 3 else sorted({int(label), (at * 5) % 13, (at * 7 + 2) % 13}) for at, label in enumerate(labels)]
    offsets = torch.tensor([0, *(len(ids) for ids in sets)]).cumsum(0)
    kept = KeptTokens(ids=torch.tensor([i for ids in sets for i in ids]), offsets=offsets)
    masked = logits.clone()
    for at, ids in enumerate(sets):
        masked[at, [i for i in range(13) if ids and i not in ids]] = -1e4
    got, entropy = token_log_probs(logits, labels, vocab_size=13, rows=rows, with_entropy=True, chunk_rows=2, kept=kept)
    expected, expected_entropy = plain(masked, labels, 1.0, 13)
    where = torch.arange(9) if rows is None else rows
    assert entropy is not None
    torch.testing.assert_close(got[where], expected[where], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy[where], expected_entropy[where], rtol=1e-12, atol=1e-12)

    def both(x: torch.Tensor) -> Any:
        return token_log_probs(
            x, labels, temperature=0.7, vocab_size=13, rows=rows, with_entropy=True, entropy_grad=True, chunk_rows=2, kept=kept
        )

    assert torch.autograd.gradcheck(both, logits.requires_grad_())


def test_kept_tokens_far_below_the_largest_logit_are_compared_with_one_another() -> None:
    logits = torch.tensor([[500.0, 0.0, 1.0]])
    kept = KeptTokens(ids=torch.tensor([1, 2]), offsets=torch.tensor([0, 2]))
    got, _ = token_log_probs(logits, torch.tensor([1]), kept=kept)
    assert float(got) == pytest.approx(-math.log1p(math.e), abs=1e-6)


def test_no_chosen_row_gives_zeros_and_a_zero_gradient() -> None:
    logits, labels = problem(torch.float32)
    logits.requires_grad_()
    log_probs, _ = token_log_probs(logits, labels, rows=torch.tensor([], dtype=torch.int64))
    log_probs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.count_nonzero() == 0


def test_the_logits_stay_as_they_are_even_after_the_backward_pass() -> None:
    logits, labels = problem(torch.float32)
    before = logits.clone()
    logits.requires_grad_()
    token_log_probs(logits, labels, temperature=0.5, vocab_size=13, with_entropy=True)[0].sum().backward()
    assert torch.equal(logits.detach(), before)


def test_entropy_has_no_gradient_unless_asked_for() -> None:
    logits, labels = problem(torch.float32)
    logits.requires_grad_()
    _, entropy = token_log_probs(logits, labels, with_entropy=True)
    assert entropy is not None
    assert not entropy.requires_grad


def test_impossible_tokens_and_large_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, float("-inf"), 0.0], [500.0, 500.0, float("-inf"), float("-inf")]], requires_grad=True)
    log_probs, entropy = token_log_probs(logits, torch.tensor([0, 1]), with_entropy=True, entropy_grad=True)
    assert entropy is not None
    torch.testing.assert_close(log_probs.detach(), torch.tensor([0.0, -0.6931472]))
    torch.testing.assert_close(entropy.detach(), torch.tensor([0.0, 0.6931472]))
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


class LargestFloat(TorchDispatchMode):
    """Remembers the largest float32 tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                self.elements = max(self.elements, value.numel())
        return out


@pytest.mark.parametrize("kind", ["policy_loss", "sft_loss"])
def test_a_loss_goes_over_as_many_rows_at_a_time_as_it_is_told(kind: str) -> None:
    mask = np.ones(40, np.float32)
    sample = TrainSample(
        tokens=np.arange(48), response_length=40, loss_mask=mask, reward=1.0, raw_reward=1.0, sample_id=0, group_id=0, rollout_id=0,
        rollout_mask_sum=40.0,
    )  # fmt: skip
    packed = pack([sample], StepPlan(micro_batches=((0,),), num_rollouts=1, num_tokens=40.0)).with_token_values(advantages=[torch.ones(40)])
    logits = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    losses = []
    for rows, largest in ((None, 40 * 64), (2, 2 * 64)):
        with LargestFloat() as seen:
            loss, _ = loss_from_logits(logits, packed, AlgorithmConfig(loss_type=kind), temperature=1.0, chunk_rows=rows)
            loss.backward()
        assert seen.elements == largest
        losses.append(loss.item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("chosen", [False, True])
def test_no_float32_copy_is_larger_than_a_chunk(chosen: bool) -> None:
    logits, labels = problem(torch.bfloat16, count=64, width=32)
    logits.requires_grad_()
    rows = torch.arange(0, 64, 2) if chosen else None
    with LargestFloat() as seen:
        log_probs, entropy = token_log_probs(logits, labels, rows=rows, with_entropy=True, entropy_grad=True, chunk_rows=8)
        assert entropy is not None
        (log_probs.sum() + entropy.sum()).backward()
    assert 0 < seen.elements <= 8 * 32
