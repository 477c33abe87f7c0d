"""Advantages of a rollout step's micro-batches, where the log-probs and values that they start from lie in the packs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vime.algorithms.advantages import compute_advantages
from vime.config.sections import AlgorithmConfig
from vime.errors import DataError, HookError
from vime.hooks import hook_errors
from vime.packing.pack import PackedBatch
from vime.types import StepPlan, TrainBatch

__all__ = ["Plans", "token_means", "with_advantages"]

Plans = list[list[PackedBatch]]  # optimizer steps, each of micro-batches
INPUTS = {  # a field of PackedBatch -> its name in slime's rollout_data
    "old_log_probs": "log_probs",
    "ref_log_probs": "ref_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "teacher_log_probs": "teacher_log_probs",
    "values": "values",
}


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
    found = {name: _per_sample(batch, plans, name) for name in INPUTS}
    if algorithm.use_opd and found["teacher_log_probs"] is None:
        raise DataError(
            "--use-opd needs the teacher's log-probs of each response, and the samples have none: with --opd-type vllm the rollout "
            "function fetches them; one of your own must set Sample.teacher_log_probs."
        )
    if function is not None:
        advantages, returns = _of_the_user(function, args, batch, found)
    else:
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
    names = {**INPUTS, "advantages": "advantages", "returns": "returns"}
    there = [ours for ours in names if all(getattr(packed, ours) is not None for packed in flat)]
    sums = torch.zeros(len(there) + 1, dtype=torch.float64)
    for packed in flat:
        of_each = [(getattr(packed, name) * packed.loss_mask).sum() for name in there]
        sums += torch.stack([*of_each, packed.loss_mask.sum()]).double().cpu()
    *totals, count = sum_over_ranks(sums).tolist()
    out = {f"rollout/{names[name]}": total / max(count, 1.0) for name, total in zip(there, totals, strict=True)}
    if "rollout/teacher_log_probs" in out and "rollout/log_probs" in out:
        out["rollout/opd_reverse_kl"] = out["rollout/log_probs"] - out["rollout/teacher_log_probs"]
    return out


def _per_sample(batch: TrainBatch, plans: Plans, name: str) -> list[torch.Tensor] | None:
    """One [R] tensor a sample of a packed field; None when the packs do not have it."""
    if any(getattr(packed, name) is None for step in plans for packed in step):
        return None
    out: dict[int, torch.Tensor] = {}
    plan: StepPlan
    for step, plan in zip(plans, batch.steps, strict=True):
        for packed, micro in zip(step, plan.micro_batches, strict=True):
            out |= zip(micro, packed.gather(getattr(packed, name)), strict=True)
    return [out[i] for i in range(len(batch.samples))]


def _of_the_user(
    function: Callable[..., Any], args: Any, batch: TrainBatch, found: dict[str, list[torch.Tensor] | None]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """--custom-advantage-function-path: it puts "advantages" and "returns" into slime's rollout_data, one [R] tensor a sample each."""
    data: dict[str, Any] = {
        "tokens": [torch.tensor(s.tokens) for s in batch.samples],
        "response_lengths": [s.response_length for s in batch.samples],
        "total_lengths": [s.length for s in batch.samples],
        "loss_masks": [torch.tensor(s.loss_mask) for s in batch.samples],
        "rewards": [s.reward for s in batch.samples],
        "raw_reward": [s.raw_reward for s in batch.samples],
        "truncated": [int(s.truncated) for s in batch.samples],
        "sample_indices": [s.sample_id for s in batch.samples],
        "group_indices": [s.group_id for s in batch.samples],
        "rollout_ids": [s.rollout_id for s in batch.samples],
        **{slimes: found[ours] for ours, slimes in INPUTS.items() if found[ours] is not None},
    }
    flag, path = "--custom-advantage-function-path", str(args.custom_advantage_function_path)
    with hook_errors(flag, path, function):
        function(args, data)
    for name in ("advantages", "returns"):
        values = data.get(name)
        shapes = None if values is None else [tuple(v.shape) for v in values]
        if shapes != [(s.response_length,) for s in batch.samples]:
            raise HookError(
                f"{flag} {path} must set rollout_data['{name}'] to one tensor [response length] a sample; found shapes {shapes}."
            )
    return list(data["advantages"]), list(data["returns"])
