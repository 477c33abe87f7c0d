"""The engine's routing: from replies' text to the places of a pack."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vime.config.sections import AlgorithmConfig, RewardConfig
from vime.errors import DataError
from vime.packing.convert import to_train_samples
from vime.packing.pack import pack
from vime.packing.routing import decoded, encoded, joined
from vime.types import StepPlan, TrainSample
from vime.utils.types import Sample

PLAN = StepPlan(micro_batches=((0, 1),), num_rollouts=2, num_tokens=5.0)


def rows(count: int, first: int = 0, layers: int = 2) -> np.ndarray:
    """[count, layers, 2]: of token t and layer l the experts 10 t + l and 10 t + l + 5."""
    at = 10 * np.arange(first, first + count)[:, None, None] + np.arange(layers)[None, :, None]
    return np.concatenate([at, at + 5], -1)


def npy(array: np.ndarray) -> str:
    out = io.BytesIO()
    np.save(out, array)
    return base64.b64encode(out.getvalue()).decode()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_what_vllm_sends_is_read_in_any_of_its_widths(dtype: type) -> None:
    chosen = rows(3).astype(dtype)
    assert np.array_equal(decoded(npy(chosen)), chosen)
    assert np.array_equal(decoded(encoded(chosen)), chosen)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no base64!", "no base64 of a .npy file"),
        (base64.b64encode(b"short").decode(), "no base64 of a .npy file"),
        (npy(np.zeros((2, 3), np.uint8)), r"has shape \(2, 3\); expected whole numbers \[tokens, layers, k\]"),
        (npy(np.zeros((2, 3, 1))), "expected whole numbers"),
        (base64.b64encode(b"\x93NUMPY").decode(), "no base64 of a .npy file"),
    ],
)
def test_other_text_is_refused(text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        decoded(text)


def test_an_object_array_is_not_unpickled() -> None:
    out = io.BytesIO()
    np.save(out, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"no base64 of a \.npy file"):
        decoded(base64.b64encode(out.getvalue()).decode())


def test_later_replies_go_on_from_earlier_ones() -> None:
    assert np.array_equal(joined([encoded(rows(3)), encoded(rows(2, first=3))]), rows(5))
    with pytest.raises(DataError, match="of several models"):
        joined([encoded(rows(1)), encoded(rows(1, layers=3))])


def sample(index: int, prompt: int, response: int, routed: np.ndarray | None) -> TrainSample:
    mask = np.ones(response, np.float32)
    return TrainSample(
        tokens=np.arange(prompt + response), response_length=response, loss_mask=mask, reward=0.0, raw_reward=0.0, sample_id=index,
        group_id=0, rollout_id=index, rollout_mask_sum=float(response), routed_experts=routed,
    )  # fmt: skip


def test_a_packs_routing_stands_at_its_tokens() -> None:
    packed = pack([sample(7, 2, 3, rows(4).astype(np.int16)), sample(8, 1, 2, None)], PLAN, multiple_of=6)
    assert packed.routed is not None
    assert packed.routed.shape == (12, 2, 2)
    assert np.array_equal(packed.routed[:4].numpy(), rows(4))
    assert torch.equal(packed.routed[4:], torch.full((8, 2, 2), -1, dtype=torch.int16))
    assert packed.emptied().routed is None
    assert packed.to("cpu").routed is not None


def test_a_micro_batch_without_any_has_none_and_one_of_two_models_is_refused() -> None:
    one = sample(7, 2, 3, rows(4).astype(np.int16))
    assert pack([replace(one, routed_experts=None)], PLAN).routed is None
    with pytest.raises(DataError, match="of several shapes"):
        pack([one, sample(8, 2, 3, rows(4, layers=3).astype(np.int16))], PLAN)


def told(rows_told: int | None, *, mask: list[int], tokens: int = 6) -> Sample:
    """A scored sample of `tokens` tokens, the engine's routing of the first of them."""
    texts = [] if rows_told is None else [encoded(rows(rows_told))]
    return Sample(
        index=3, group_index=0, tokens=list(range(tokens)), response_length=len(mask), loss_mask=mask, reward=1.0,
        rollout_routed_experts=texts, status=Sample.Status.COMPLETED,
    )  # fmt: skip


def converted(sample: Sample, **algorithm: bool) -> TrainSample:
    config = AlgorithmConfig(use_rollout_routing_replay=True, rewards_normalization=False, **algorithm)
    (out,) = to_train_samples([sample], algorithm=config, reward=RewardConfig(), args=SimpleNamespace(reward_key=None))
    return out


def test_a_samples_routing_reaches_the_trainer_when_it_is_trained_with() -> None:
    assert np.array_equal(converted(told(5, mask=[1, 1, 1])).routed_experts, rows(5))
    assert np.array_equal(converted(told(3, mask=[1, 0, 0])).routed_experts, rows(3))  # what predicts the last trained token is there
    assert converted(told(None, mask=[0, 0, 0])).routed_experts is None
    unused = AlgorithmConfig(rewards_normalization=False)
    (out,) = to_train_samples([told(5, mask=[1])], algorithm=unused, reward=RewardConfig(), args=SimpleNamespace(reward_key=None))
    assert out.routed_experts is None


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (told(None, mask=[1]), r"sample 3 \(group 0\) has no rollout_routed_experts, which --use-rollout-routing-replay trains with"),
        (told(4, mask=[1, 1, 1]), "covers 4 of 6 tokens; expected at least the 5 before the last trained one"),
        (told(6, mask=[1, 1, 1]), "covers 6 of 6 tokens"),
    ],
)
def test_a_sample_whose_routing_is_not_there_is_refused(sample: Sample, said: str) -> None:
    with pytest.raises(DataError, match=said):
        converted(sample)
