"""slime's training data from a function of the user's: what becomes of it, and how faults are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vime.config.sections import AlgorithmConfig, DataConfig, RewardConfig
from vime.errors import HookError
from vime.packing.build import build_train_batches
from vime.packing.own_data import from_train_data
from vime.utils.types import Sample

SAMPLES = [Sample(index=i, group_index=10 + i // 2, tokens=[1, 2, 3], response_length=1, reward=0.0) for i in range(4)]


def plain(**changes: Any) -> dict[str, Any]:
    """Two entries with what is needed."""
    return {"tokens": [[5, 9, 2, 17], [5, 9, 1]], "response_lengths": [2, 1], "rewards": [0.5, -0.5]} | changes


def test_what_is_not_given_has_defaults() -> None:
    first, second = from_train_data(plain(sample_indices=[0, 3]), SAMPLES)
    assert first.tokens.tolist() == [5, 9, 2, 17]
    assert (first.loss_mask.tolist(), first.rollout_mask_sum, first.reward, first.raw_reward) == ([1.0, 1.0], 2.0, 0.5, 0.5)
    assert [(s.sample_id, s.rollout_id, s.group_id) for s in (first, second)] == [(0, 0, 10), (3, 3, 11)]
    assert first.rollout_log_probs is None
    assert not first.truncated


def test_what_is_given_is_taken() -> None:
    data = plain(
        raw_reward=[1.0, 0.0], loss_masks=[[0, 1], [1]], rollout_ids=[7, 7], group_indices=[2, 2], truncated=[1, 0],
        rollout_log_probs=[[-1.0, -2.0], [-3.0]], weight_versions=[[4, 5], [5]],
    )  # fmt: skip
    first, second = from_train_data(data, SAMPLES)
    assert (first.raw_reward, first.rollout_id, first.group_id, first.truncated) == (1.0, 7, 2, True)
    assert first.rollout_mask_sum == second.rollout_mask_sum == 2.0
    assert first.rollout_log_probs is not None
    assert first.rollout_log_probs.dtype == np.float32
    assert first.weight_versions is not None
    assert first.weight_versions.tolist() == [4.0, 5.0]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([1], "returned a list"),
        ({"tokens": []}, "without response_lengths, rewards"),
        (plain(round_number=[1, 2]), "entries that nothing reads: round_number"),
        (plain(rewards=[1.0]), "'rewards' has 1 entries, 'tokens' has 2"),
        (plain(response_lengths=[4, 1]), "entry 0 has 4 tokens and the response length 4"),
        (plain(loss_masks=[[1], [1]]), r"loss_masks\[0\] must be 2 finite numbers"),
        (plain(loss_masks=[[2, 1], [1]]), "only 0 and 1"),
        (plain(rewards=[float("nan"), 0.0]), r"rewards\[0\] is nan"),
    ],
)
def test_faults_are_named(data: Any, said: str) -> None:
    with pytest.raises(HookError, match=f"--custom-convert-samples-to-train-data-path: .*{said}"):
        from_train_data(data, SAMPLES)


def test_batches_are_built_from_it() -> None:
    (batch,) = build_train_batches(
        SAMPLES, rollout_id=1, data=DataConfig(rollout_batch_size=2), algorithm=AlgorithmConfig(), reward=RewardConfig(), dp_size=1,
        args=None, train_data=plain(),
    )  # fmt: skip
    assert sorted(sample.length for sample in batch.samples) == [3, 4]
    assert batch.steps[0].num_tokens == 3.0
