"""What Megatron's schedule is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vime.backends.megatron_utils import step
from vime.packing.pack import PackedBatch, pack
from vime.types import StepPlan, TrainSample


@pytest.mark.parametrize(("tensor", "sequence", "size"), [(1, False, 2), (2, True, 2), (4, True, 4), (4, False, 2), (8, True, 8)])
def test_what_fills_a_round_of_the_pipeline_can_be_split_among_the_tensor_parallel_ranks(
    monkeypatch: pytest.MonkeyPatch, tensor: int, sequence: bool, size: int
) -> None:
    """Three micro-batches on two stages of two chunks each; sequence parallelism gives each rank the same share of the tokens."""
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": 2, "sequence_parallel": sequence}
    chunk: Any = SimpleNamespace(config=SimpleNamespace(num_moe_experts=None, **sizes))
    seen: list[PackedBatch] = []

    def schedule(*, data_iterator: list[Any], **_: Any) -> list[PackedBatch]:
        seen.extend(data_iterator[0])
        return seen

    monkeypatch.setattr(step, "get_forward_backward_func", lambda: schedule)
    sample = TrainSample(
        tokens=np.arange(11), response_length=3, loss_mask=np.ones(3, np.float32), reward=0.0, raw_reward=0.0, sample_id=0, group_id=0,
        rollout_id=0, rollout_mask_sum=3.0,
    )  # fmt: skip
    packed = pack([sample], StepPlan(micro_batches=((0,),), num_rollouts=1, num_tokens=3.0), multiple_of=tensor if sequence else 1)
    found = step._run([chunk, chunk], [packed] * 3, lambda *_: None, whole=False, forward_only=True)
    assert [len(found), len(seen)] == [3, 4]
    assert (seen[-1].is_filler, seen[-1].num_tokens) == (True, size)
