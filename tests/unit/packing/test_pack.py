"""Packing: alignment of labels, masks, weights and per-token values; padding; what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.errors import DataError
from vime.packing.pack import pack
from vime.types import StepPlan, TrainSample

PLAN = StepPlan(micro_batches=((0, 1),), num_rollouts=2, num_tokens=4.0)


def sample(number: int, prompt: int, mask: list[int], **changes: object) -> TrainSample:
    """Tokens 100 * number + 1, 2, ...; a rollout of its own."""
    values: dict[str, object] = {
        "tokens": 100 * number + 1 + np.arange(prompt + len(mask)),
        "response_length": len(mask),
        "loss_mask": np.array(mask, dtype=np.float32),
        "reward": 0.0,
        "raw_reward": 0.0,
        "sample_id": 10 + number,
        "group_id": 0,
        "rollout_id": number,
        "rollout_mask_sum": float(sum(mask)),
    }
    return TrainSample(**{**values, **changes})  # type: ignore[arg-type]


def test_every_field_of_a_small_example() -> None:
    packed = pack([sample(1, 3, [1, 1]), sample(2, 1, [1, 0, 1])], PLAN, multiple_of=4)
    assert packed.tokens.tolist() == [101, 102, 103, 104, 105, 201, 202, 203, 204, 0, 0, 0]
    assert packed.labels.tolist() == [102, 103, 104, 105, 0, 202, 203, 204, 0, 0, 0, 0]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert packed.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 0, 1, 0, 0, 0, 0]
    assert packed.loss_weight.tolist() == [0, 0, 0.25, 0.25, 0, 0.25, 0, 0.25, 0, 0, 0, 0]
    assert packed.sequence_ids.tolist() == [0] * 5 + [1] * 4 + [-1] * 3
    assert packed.cu_seqlens.tolist() == [0, 5, 9, 12]
    assert packed.cu_seqlens.dtype == torch.int32
    assert (packed.max_seqlen, packed.sample_ids, packed.denominator) == (5, (11, 12), 2.0)
    assert packed.trained_rows.tolist() == [2, 3, 5, 7]
    assert packed.rollout_log_probs is None


def test_per_token_weights_are_one_over_the_steps_tokens() -> None:
    packed = pack([sample(1, 3, [1, 1]), sample(2, 1, [1, 0, 1])], PLAN, aggregation="token")
    assert packed.loss_weight.sum().item() == 1.0
    assert set(packed.loss_weight.tolist()) == {0.0, 0.25}


def test_segments_of_one_rollout_share_one_mean() -> None:
    plan = StepPlan(micro_batches=((0, 1, 2),), num_rollouts=2, num_tokens=6.0)
    segments = [sample(1, 2, [1], rollout_mask_sum=4.0), sample(1, 2, [1, 1, 1], rollout_mask_sum=4.0), sample(2, 2, [1, 1])]
    weight = pack(segments, plan).loss_weight
    assert weight[weight > 0].tolist() == [0.125] * 4 + [0.25] * 2


def test_a_rollout_without_trained_tokens_weighs_nothing_and_is_not_nan() -> None:
    packed = pack([sample(1, 2, [0, 0]), sample(2, 2, [])], PLAN)
    assert packed.loss_weight.tolist() == [0.0] * packed.num_tokens


def test_rollout_log_probs_come_along_in_the_same_alignment() -> None:
    values = np.array([-1.0, -2.0], dtype=np.float32)
    packed = pack([sample(1, 2, [1, 0], rollout_log_probs=values)], PLAN)
    assert packed.rollout_log_probs is not None
    assert packed.rollout_log_probs.tolist() == [0, -1, -2, 0]


@given(
    shapes=st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(0, 1), max_size=6)), min_size=1, max_size=6),
    multiple_of=st.integers(1, 16),
)
@settings(max_examples=60, deadline=None)
def test_gather_undoes_scatter_and_labels_are_the_response(shapes: list[tuple[int, list[int]]], multiple_of: int) -> None:
    samples = [sample(number, prompt, mask) for number, (prompt, mask) in enumerate(shapes)]
    packed = pack(samples, PLAN, multiple_of=multiple_of)
    assert packed.num_tokens % multiple_of == 0
    assert packed.num_tokens - sum(s.length for s in samples) < multiple_of
    for labels, one in zip(packed.gather(packed.labels), samples, strict=True):
        assert labels.tolist() == one.tokens[one.length - one.response_length :].tolist()
    for mask, one in zip(packed.gather(packed.loss_mask), samples, strict=True):
        assert mask.tolist() == one.loss_mask.tolist()
    values = [torch.rand(s.response_length) for s in samples]
    spread = packed.with_token_values(advantages=values).advantages
    assert spread is not None
    assert all(torch.equal(a, b) for a, b in zip(packed.gather(spread), values, strict=True))
    assert spread.count_nonzero() <= sum(s.response_length for s in samples)


def test_kept_tokens_stand_at_the_positions_that_predict_them() -> None:
    kept = {"kept_ids": np.array([4, 5, 6], np.int32), "kept_offsets": np.array([0, 2, 3], np.int64)}
    packed = pack([sample(0, 2, [1, 1], **kept), sample(1, 1, [1])], StepPlan(micro_batches=(), num_rollouts=2, num_tokens=3))
    assert packed.kept is not None
    assert packed.kept.ids.tolist() == [4, 5, 6]
    assert packed.kept.offsets.tolist() == [0, 0, 2, 3, 3, 3, 3]
    some = packed.kept.of(torch.tensor([2, 0, 1]))
    assert (some.ids.tolist(), some.offsets.tolist()) == ([6, 4, 5], [0, 1, 1, 3])


def test_gather_is_differentiable() -> None:
    packed = pack([sample(1, 2, [1, 1])], PLAN)
    values = torch.zeros(4, requires_grad=True)
    packed.gather(values)[0].sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0, 1, 1, 0]


def test_wrong_token_values_are_refused() -> None:
    packed = pack([sample(1, 2, [1, 1])], PLAN)
    with pytest.raises(ValueError, match="unknown rewards"):
        packed.with_token_values(rewards=torch.zeros(4))
    with pytest.raises(ValueError, match="expected \\(4,\\)"):
        packed.with_token_values(advantages=torch.zeros(3))
    with pytest.raises(ValueError, match="2 response tokens but 3 values"):
        packed.with_token_values(advantages=[torch.zeros(3)])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "at least one sample"),
        ([sample(1, 0, [1, 1])], "at least one token before the response"),
        ([sample(1, 2, [1, 1], loss_mask=np.ones(3, dtype=np.float32))], "loss_mask has 3 values for 2"),
        ([sample(1, 2, [1], rollout_log_probs=np.zeros(2, dtype=np.float32))], "rollout_log_probs has 2 values for 1"),
        ([sample(1, 2, [1], rollout_log_probs=np.zeros(1, dtype=np.float32)), sample(2, 2, [1])], "sample 12 has no rollout_log_probs"),
        ([sample(1, 2, [1]), sample(2, 2, [1], rollout_log_probs=np.zeros(1, dtype=np.float32))], "sample 11 has no rollout_log_probs"),
    ],
)
def test_bad_samples_are_refused(samples: list[TrainSample], message: str) -> None:
    with pytest.raises(DataError, match=message):
        pack(samples, PLAN)


def test_an_emptied_batch_is_two_tokens_with_nothing_trained() -> None:
    whole = pack([sample(1, 3, [1, 1]), sample(2, 1, [1, 0, 1])], PLAN)
    batch = whole.emptied()
    assert (whole.is_filler, batch.is_filler) == (False, True)
    assert batch.tokens.tolist() == [101, 102]
    assert batch.cu_seqlens.tolist() == [0, 2]
    assert not batch.loss_weight.any()
    assert not len(batch.trained_rows)
    assert [values.shape for values in batch.gather(batch.labels)] == [(1,)]


@pytest.mark.parametrize("parallel", [4, 8])
def test_an_emptied_batch_keeps_a_token_for_each_rank_of_sequence_parallelism(parallel: int) -> None:
    """Also of a pack that is padded to it."""
    whole = pack([sample(1, 1, [1, 1])], PLAN, multiple_of=parallel)
    batch = whole.emptied(parallel)
    assert batch.num_tokens == len(batch.position_ids) == parallel
    assert (batch.lengths, batch.response_lengths) == ((parallel,), (parallel - 1,))
    assert batch.sequence_ids.tolist() == [0] * parallel
    assert batch.cu_seqlens.tolist() == [0, parallel]
    assert not batch.loss_weight.any()
