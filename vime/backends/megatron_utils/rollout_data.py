"""slime's rollout_data: the samples of a rollout step as lists by name, which users' functions read and change before training on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from vime.errors import HookError
from vime.hooks import hook_errors
from vime.packing.pack import PackedBatch
from vime.types import FILLER_ID, TrainBatch, TrainSample

__all__ = ["TOKEN_VALUES", "Plans", "postprocessed", "rollout_data", "sample_columns", "shown_samples", "with_masks"]

Plans = list[list[PackedBatch]]  # optimizer steps, each of micro-batches
TOKEN_VALUES = {  # a field of PackedBatch -> its name in slime's rollout_data
    "old_log_probs": "log_probs",
    "ref_log_probs": "ref_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "teacher_log_probs": "teacher_log_probs",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
    "entropies": "entropy",
}
FLAG = "--rollout-data-postprocess-path"


def shown_samples(batch: TrainBatch) -> list[int]:
    """The places in `batch.samples` that users' functions see: all but fillers."""
    return [place for place, sample in enumerate(batch.samples) if sample.sample_id != FILLER_ID]


def sample_columns(samples: Sequence[TrainSample]) -> dict[str, list[Any]]:
    """What `samples` say of themselves under slime's names, one entry each; tokens and masks are tensors [T] and [R]."""
    return {
        "tokens": [torch.tensor(s.tokens) for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "total_lengths": [s.length for s in samples],
        "loss_masks": [torch.tensor(s.loss_mask) for s in samples],
        "rewards": [s.reward for s in samples],
        "raw_reward": [s.raw_reward for s in samples],
        "truncated": [int(s.truncated) for s in samples],
        "sample_indices": [s.sample_id for s in samples],
        "group_indices": [s.group_id for s in samples],
        "rollout_ids": [s.rollout_id for s in samples],
    }


def rollout_data(batch: TrainBatch, plans: Plans) -> dict[str, Any]:
    """One list a name, with an entry for each sample of this data-parallel rank that is no filler; per-token values are [R] tensors.

    The names of TOKEN_VALUES are there when the packs have them.
    """
    shown = shown_samples(batch)
    samples = [batch.samples[place] for place in shown]
    data = sample_columns(samples) | {"metadata": [s.metadata for s in samples]}
    for ours, slimes in TOKEN_VALUES.items():
        values = per_sample(batch, plans, ours)
        if values is not None:
            data[slimes] = [values[place] for place in shown]
    return data


def per_sample(batch: TrainBatch, plans: Plans, name: str) -> list[torch.Tensor] | None:
    """One [R] tensor a sample of `batch` of a packed field; None when the packs do not have it."""
    if any(getattr(packed, name) is None for step in plans for packed in step):
        return None
    out: dict[int, torch.Tensor] = {}
    for step, plan in zip(plans, batch.steps, strict=True):
        for packed, micro in zip(step, plan.micro_batches, strict=True):
            out |= zip(micro, packed.gather(getattr(packed, name)), strict=True)
    return [out[i] for i in range(len(batch.samples))]


def with_values(batch: TrainBatch, plans: Plans, name: str, shown: Sequence[torch.Tensor]) -> Plans:
    """`plans` with the packed field `name` from one [R] tensor for each of `shown_samples`; 0 in fillers."""
    values = [torch.zeros(sample.response_length) for sample in batch.samples]
    for place, value in zip(shown_samples(batch), shown, strict=True):
        values[place] = value
    return [
        [
            packed.with_token_values(**{name: [values[i].to(packed.tokens.device) for i in micro]})
            for packed, micro in zip(step, plan.micro_batches, strict=True)
        ]
        for step, plan in zip(plans, batch.steps, strict=True)
    ]


def checked(data: dict[str, Any], name: str, batch: TrainBatch, where: str) -> list[torch.Tensor]:
    """rollout_data[name] as one tensor [R] for each sample that was shown. Raises HookError where it is none."""
    values = data.get(name)
    lengths = [(batch.samples[place].response_length,) for place in shown_samples(batch)]
    shapes = None if values is None else [tuple(getattr(value, "shape", ())) for value in values]
    if values is None or shapes != lengths:
        raise HookError(f"{where} must set rollout_data['{name}'] to one tensor [response length] a sample; found shapes {shapes}.")
    return list(values)


def postprocessed(batch: TrainBatch, plans: Plans, function: Callable[..., Any], args: Any) -> Plans:
    """--rollout-data-postprocess-path: call `function`(args, rollout_id, rollout_data) and take what it leaves there.

    The per-token values of TOKEN_VALUES, changed in place or replaced, are those that the loss uses. A loss mask may lose ones: the
    token is silent, and the denominators of the step's means stay. The other names are for reading. Raises HookError.
    """
    path = str(args.rollout_data_postprocess_path)
    data = rollout_data(batch, plans)
    before = [mask.clone() for mask in data["loss_masks"]]
    there = set(data)
    with hook_errors(FLAG, path, function):
        function(args, batch.rollout_id, data)
    where = f"{FLAG} {path}"
    masks = checked(data, "loss_masks", batch, where)
    for place, old, new in zip(shown_samples(batch), before, masks, strict=True):
        if not bool(((new == old) | (new == 0)).all()):
            raise HookError(
                f"{where} set a loss mask of sample {batch.samples[place].sample_id} to something else than the ones it had, or 0. "
                "It can silence tokens; what is trained is decided by Sample.loss_mask."
            )
    for ours, slimes in TOKEN_VALUES.items():
        if slimes in there or data.get(slimes) is not None:
            plans = with_values(batch, plans, ours, checked(data, slimes, batch, where))
    return with_masks(batch, plans, masks)


def with_masks(batch: TrainBatch, plans: Plans, masks: Sequence[torch.Tensor]) -> Plans:
    """`plans` in which those tokens alone are trained that `masks`, [R] of each of `shown_samples`, have left."""
    full = [torch.zeros(sample.response_length) for sample in batch.samples]
    for place, mask in zip(shown_samples(batch), masks, strict=True):
        full[place] = mask
    out = []
    for step, plan in zip(plans, batch.steps, strict=True):
        kept = [
            packed.scatter([full[i].to(packed.tokens.device) for i in micro])
            for packed, micro in zip(step, plan.micro_batches, strict=True)
        ]
        out.append([replace(p, loss_mask=p.loss_mask * k, loss_weight=p.loss_weight * k) for p, k in zip(step, kept, strict=True)])
    return out
