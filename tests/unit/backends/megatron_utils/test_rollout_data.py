"""slime's rollout_data: what users' functions see of the packs, and what of it comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vime.backends.megatron_utils.rollout_data import Plans, postprocessed, rollout_data
from vime.errors import HookError
from vime.packing.pack import pack
from vime.types import FILLER_ID, StepPlan, TrainBatch, TrainSample

ARGS = SimpleNamespace(rollout_data_postprocess_path="a.b")


def sample(index: int, response: int) -> TrainSample:
    mask = np.ones(response, np.float32)
    return TrainSample(
        tokens=np.arange(response + 2), response_length=response, loss_mask=mask, reward=float(index), raw_reward=0.0, sample_id=index,
        group_id=0, rollout_id=index, rollout_mask_sum=float(response), rollout_log_probs=-mask,
    )  # fmt: skip


def batch_and_plans() -> tuple[TrainBatch, Plans]:
    """Two steps; the second has one sample and a filler."""
    filler = replace(sample(FILLER_ID, 1), loss_mask=np.zeros(1, np.float32), rollout_log_probs=np.zeros(1, np.float32))
    samples = (sample(7, 3), sample(8, 2), sample(9, 4), filler)
    steps = tuple(StepPlan(micro_batches=micro, num_rollouts=count, num_tokens=9.0) for micro, count in ((((0, 1),), 2), (((2,), (3,)), 1)))
    batch = TrainBatch(rollout_id=4, samples=samples, steps=steps)
    plans = [[pack([samples[i] for i in micro], plan) for micro in plan.micro_batches] for plan in steps]
    values = iter([[torch.full((samples[i].response_length,), i % 3.0) for i in micro] for plan in steps for micro in plan.micro_batches])
    return batch, [[packed.with_token_values(advantages=next(values)) for packed in step] for step in plans]


def test_samples_are_shown_in_order_and_fillers_are_not() -> None:
    data = rollout_data(*batch_and_plans())
    assert data["sample_indices"] == [7, 8, 9]
    assert [len(mask) for mask in data["loss_masks"]] == data["response_lengths"] == [3, 2, 4]
    assert [values.tolist() for values in data["advantages"]] == [[0.0] * 3, [1.0] * 2, [2.0] * 4]
    assert "values" not in data


def test_what_is_set_or_changed_in_place_comes_back_to_its_place() -> None:
    def change(args: Any, rollout_id: int, data: dict[str, Any]) -> None:
        assert (args, rollout_id) == (ARGS, 4)
        data["advantages"][1] += 10
        data["ref_log_probs"] = [torch.full((n,), 0.5) for n in data["response_lengths"]]
        data["loss_masks"][2][1] = 0

    batch, plans = batch_and_plans()
    (first,), (second, filler) = postprocessed(batch, plans, change, ARGS)
    assert [values.tolist() for values in first.gather(first.advantages)] == [[0.0] * 3, [11.0] * 2]
    assert second.gather(second.loss_mask)[0].tolist() == [1, 0, 1, 1]
    assert second.gather(second.loss_weight)[0].tolist() == [0.25, 0, 0.25, 0.25]
    assert second.denominator == plans[1][0].denominator
    assert second.gather(second.ref_log_probs)[0].tolist() == [0.5] * 4
    assert not filler.ref_log_probs.any()


def test_a_hook_that_changes_nothing_changes_nothing() -> None:
    batch, plans = batch_and_plans()
    for step, same in zip(plans, postprocessed(batch, plans, lambda args, rollout_id, data: None, ARGS), strict=True):
        for packed, other in zip(step, same, strict=True):
            for name in ("advantages", "rollout_log_probs", "loss_mask", "loss_weight"):
                assert torch.equal(getattr(packed, name), getattr(other, name)), name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.pop("advantages"), "must set rollout_data['advantages'] to one tensor [response length] a sample; found"),
        (lambda data: data.update(advantages=data["advantages"][:1]), "found shapes [(3,)]"),
        (lambda data: data.update(returns=[1.0, 2.0, 3.0]), "must set rollout_data['returns']"),
        (lambda data: data["loss_masks"][0].fill_(2), "sample 7 to something else than the ones it had, or 0"),
        (lambda data: data["nothing"], "raised KeyError: 'nothing' at"),
    ],
)
def test_faults_of_the_hook_are_named(change: Callable[[dict[str, Any]], Any], said: str) -> None:
    with pytest.raises(HookError) as caught:
        postprocessed(*batch_and_plans(), lambda args, rollout_id, data: change(data), ARGS)
    assert str(caught.value).startswith("--rollout-data-postprocess-path a.b ")
    assert said in str(caught.value)
