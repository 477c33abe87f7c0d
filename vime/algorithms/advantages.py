"""From the samples of one rollout step to an advantage per response token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vime.algorithms.distillation import distilled_advantages
from vime.algorithms.estimators import Tokens
from vime.algorithms.registry import ADVANTAGES, KL_ESTIMATORS
from vime.algorithms.whitening import masked_sums, whiten
from vime.config.sections import AlgorithmConfig
from vime.types import TrainSample

__all__ = ["compute_advantages"]

PerSample = Sequence[torch.Tensor]


def compute_advantages(
    samples: Sequence[TrainSample],
    algorithm: AlgorithmConfig,
    *,
    log_probs: PerSample | None = None,
    ref_log_probs: PerSample | None = None,
    teacher_log_probs: PerSample | None = None,
    values: PerSample | None = None,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(advantages, returns): one f32 [R] tensor a sample each, of this rank's samples of a whole rollout step.

    The inputs, where the settings need them, are one [R] tensor a sample: the policy's, the reference's (--kl-coef) and the teacher's
    (--use-opd) log-probs in nats, and the critic's values. They are looked at where the loss mask is 1; elsewhere the results are 0.
    A sample without trained tokens is no special case. With --normalize-advantages the advantages are whitened over the trained tokens
    of all ranks: `sum_over_ranks` must then add a [3] float64 tensor up over the data-parallel ranks (None = there is one rank).
    """
    advantages: list[torch.Tensor] = []
    returns: list[torch.Tensor] = []
    for i, sample in enumerate(samples):
        mask = torch.tensor(sample.loss_mask)
        rows = mask.nonzero().squeeze(-1)
        zeros = torch.zeros(len(rows), dtype=torch.float64)
        kl = zeros
        if algorithm.kl_coef != 0:
            kl = KL_ESTIMATORS[algorithm.kl_loss_type](_of(log_probs, i, rows, "log_probs"), _of(ref_log_probs, i, rows, "ref_log_probs"))
        mine = zeros if values is None else _of(values, i, rows, "values")
        pair = ADVANTAGES[algorithm.advantage_estimator].function(
            Tokens(
                reward=sample.reward, kl=kl, values=mine, kl_coef=algorithm.kl_coef, gamma=algorithm.gamma, lambd=algorithm.lambd,
            )
        )  # fmt: skip
        for out, found in zip((advantages, returns), pair, strict=True):
            out.append(torch.zeros(len(mask), dtype=torch.float32).index_copy(0, rows, found.float()))
    if algorithm.use_opd:
        assert log_probs is not None
        assert teacher_log_probs is not None
        advantages = [
            distilled_advantages(a, s.cpu(), t.cpu(), algorithm.opd_kl_coef) * torch.tensor(sample.loss_mask)
            for a, s, t, sample in zip(advantages, log_probs, teacher_log_probs, samples, strict=True)
        ]
    if algorithm.normalize_advantages:
        advantages = _whitened(samples, advantages, sum_over_ranks)
    return advantages, returns


def _of(per_sample: PerSample | None, i: int, rows: torch.Tensor, name: str) -> torch.Tensor:
    """The trained tokens' values of sample `i`."""
    if per_sample is None:
        raise ValueError(f"compute_advantages needs {name} with these settings.")
    return per_sample[i].detach().double().cpu()[rows]


def _whitened(
    samples: Sequence[TrainSample], advantages: list[torch.Tensor], sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None
) -> list[torch.Tensor]:
    """Mean 0 and variance 1 over the trained tokens of all ranks."""
    masks = [torch.tensor(s.loss_mask) for s in samples]
    sums = masked_sums(torch.cat(advantages), torch.cat(masks)) if samples else torch.zeros(3, dtype=torch.float64)
    if sum_over_ranks is not None:
        sums = sum_over_ranks(sums)
    return [whiten(values, sums) * mask for values, mask in zip(advantages, masks, strict=True)]
