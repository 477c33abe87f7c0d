"""Advantages of a rollout step's micro-batches, where the log-probs and values that they start from lie in the packs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vime.algorithms.advantages import compute_advantages
from vime.backends.megatron_utils.rollout_data import TOKEN_VALUES, Plans, checked, per_sample, rollout_data, with_values
from vime.config.sections import AlgorithmConfig
from vime.errors import DataError
from vime.hooks import hook_errors
from vime.types import TrainBatch

__all__ = ["token_means", "with_advantages"]

INPUTS = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "teacher_log_probs", "values")  # what advantages may start from


def with_advantages(
    batch: TrainBatch,
    plans: Plans,
    algorithm: AlgorithmConfig,
    *,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
    function: Callable[..., Any] | None = None,
    args: Any = None,
) -> Plans:
    """`plans` with advantages and returns, from --advantage-estimator or from the user's `function`(args, rollout_data).

    `sum_over_ranks` as in `compute_advantages`. Raises DataError when a teacher's log-probs are missing, HookError for the function's
    faults.
    """
    found = {name: per_sample(batch, plans, name) for name in INPUTS}
    if algorithm.use_opd and found["teacher_log_probs"] is None:
        raise DataError(
            "--use-opd needs the teacher's log-probs of each response, and the samples have none: with --opd-type vllm the rollout "
            "function fetches them; one of your own must set Sample.teacher_log_probs."
        )
    if function is not None:
        return _of_the_user(function, args, batch, plans)
    advantages, returns = compute_advantages(
        batch.samples,
        algorithm,
        log_probs=found["old_log_probs"],
        ref_log_probs=found["ref_log_probs"],
        teacher_log_probs=found["teacher_log_probs"],
        values=found["values"],
        sum_over_ranks=sum_over_ranks,
    )
    return [
        [
            packed.with_token_values(advantages=[advantages[i] for i in micro], returns=[returns[i] for i in micro])
            for packed, micro in zip(step, plan.micro_batches, strict=True)
        ]
        for step, plan in zip(plans, batch.steps, strict=True)
    ]


def token_means(plans: Plans, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
    """rollout/NAME: means over the trained tokens of the whole rollout step, of what the packs hold (slime's names), and how far the
    student is from its teacher. The same on all data-parallel ranks, over which `sum_over_ranks` adds a float64 tensor up."""
    flat = [packed for step in plans for packed in step]
    there = [ours for ours in TOKEN_VALUES if all(getattr(packed, ours) is not None for packed in flat)]
    sums = torch.zeros(len(there) + 1, dtype=torch.float64)
    for packed in flat:
        of_each = [(getattr(packed, name) * packed.loss_mask).sum() for name in there]
        sums += torch.stack([*of_each, packed.loss_mask.sum()]).double().cpu()
    *totals, count = sum_over_ranks(sums).tolist()
    out = {f"rollout/{TOKEN_VALUES[name]}": total / max(count, 1.0) for name, total in zip(there, totals, strict=True)}
    if "rollout/teacher_log_probs" in out and "rollout/log_probs" in out:
        out["rollout/opd_reverse_kl"] = out["rollout/log_probs"] - out["rollout/teacher_log_probs"]
    return out


def _of_the_user(function: Callable[..., Any], args: Any, batch: TrainBatch, plans: Plans) -> Plans:
    """--custom-advantage-function-path: it puts "advantages" and "returns" into slime's rollout_data, one [R] tensor a sample each."""
    data = rollout_data(batch, plans)
    flag, path = "--custom-advantage-function-path", str(args.custom_advantage_function_path)
    with hook_errors(flag, path, function):
        function(args, data)
    for name in ("advantages", "returns"):
        plans = with_values(batch, plans, name, checked(data, name, batch, f"{flag} {path}"))
    return plans
