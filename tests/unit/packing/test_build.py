"""Train batches: whole rollouts per step, nothing lost or counted twice, equal micro-batches on all ranks, bad input named."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.config.sections import AlgorithmConfig, DataConfig, RewardConfig
from vime.errors import ConfigError, DataError, GenerationError, RewardError
from vime.packing.balance import sequence_cost
from vime.packing.build import build_train_batches, packing_metrics
from vime.types import FILLER_ID, TrainBatch
from vime.utils.types import Sample

BUDGET = DataConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=32)


def sample(index: int | None, *, response: int = 3, group: int | None = 0, reward: Any = 1.0, **fields: Any) -> Sample:
    """A completed sample with a prompt of two tokens."""
    values: dict[str, Any] = {
        "index": index,
        "group_index": group,
        "tokens": list(range(response + 2)),
        "response_length": response,
        "reward": reward,
        "status": Sample.Status.COMPLETED,
        "label": "seven",
    }
    return Sample(**{**values, **fields})


def build(samples: list[Sample], data: DataConfig = BUDGET, dp_size: int = 1, **changes: Any) -> list[TrainBatch]:
    """build_train_batches with defaults."""
    parts: dict[str, Any] = {"algorithm": AlgorithmConfig(), "reward": RewardConfig(), "args": SimpleNamespace(reward_key=None), **changes}
    return build_train_batches(samples, rollout_id=4, data=data, dp_size=dp_size, **parts)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    dp_size=st.integers(1, 4),
    dynamic=st.booleans(),
    global_batch_size=st.one_of(st.none(), st.integers(1, 12)),
    siblings=st.integers(1, 3),
)
@settings(max_examples=80, deadline=None)
def test_each_sample_is_in_exactly_one_micro_batch(
    lengths: list[int], dp_size: int, dynamic: bool, global_batch_size: int | None, siblings: int
) -> None:
    samples = [sample(i, response=n, group=i // 4, rollout_id=i // siblings) for i, n in enumerate(lengths)]
    for one in samples:
        one.group_index = one.rollout_id // 4  # type: ignore[operator]
    data = DataConfig(use_dynamic_batch_size=dynamic, max_tokens_per_gpu=32, micro_batch_size=3, global_batch_size=global_batch_size)
    batches = build(samples, data, dp_size)
    seen = Counter()
    steps_of_rollout: dict[int, set[int]] = {}
    for batch in batches:
        used = Counter(i for plan in batch.steps for micro in plan.micro_batches for i in micro)
        assert used == Counter(range(len(batch.samples)))
        for number, plan in enumerate(batch.steps):
            for micro in plan.micro_batches:
                assert micro
                members = [batch.samples[i] for i in micro]
                if dynamic:
                    assert sum(s.length for s in members) <= 32 or len(members) == 1
                else:
                    assert len(members) <= 3
                for one in members:
                    seen[one.sample_id] += 1
                    if one.sample_id != FILLER_ID:
                        steps_of_rollout.setdefault(one.rollout_id, set()).add(number)
    seen.pop(FILLER_ID, None)
    assert seen == Counter(range(len(lengths)))
    assert all(len(steps) == 1 for steps in steps_of_rollout.values())
    for plans in zip(*(batch.steps for batch in batches), strict=True):
        assert len({(len(p.micro_batches), p.num_rollouts, p.num_tokens) for p in plans}) == 1
    assert sum(plan.num_rollouts for plan in batches[0].steps) == len(steps_of_rollout)
    assert sum(plan.num_tokens for plan in batches[0].steps) == sum(lengths)


@pytest.mark.parametrize(
    ("rollouts", "size", "expected"),
    [(8, 4, [4, 4]), (9, 4, [4, 5]), (7, 4, [3, 4]), (11, 4, [3, 4, 4]), (3, 8, [3]), (5, None, [5]), (1, 1, [1])],
)
def test_a_remainder_is_spread_over_the_steps(rollouts: int, size: int | None, expected: list[int]) -> None:
    batch = build([sample(i) for i in range(rollouts)], DataConfig(global_batch_size=size))[0]
    assert [plan.num_rollouts for plan in batch.steps] == expected


def test_num_steps_per_rollout() -> None:
    batch = build([sample(i) for i in range(8)], DataConfig(num_steps_per_rollout=4))[0]
    assert [plan.num_rollouts for plan in batch.steps] == [2, 2, 2, 2]


def test_rewards_are_compared_inside_their_group() -> None:
    samples = [sample(0, reward=1.0), sample(1, reward=0.0), sample(2, reward=5.0, group=1), sample(3, reward=5.0, group=1)]
    found = {s.sample_id: s for s in build(samples)[0].samples}
    assert found[0].reward == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6))
    assert found[1].reward == -found[0].reward
    assert (found[2].reward, found[2].raw_reward) == (0.0, 5.0)


def test_failed_samples_are_in_no_statistic_and_no_loss() -> None:
    failed = sample(2, reward=None, tokens=[], response_length=0, status=Sample.Status.FAILED)
    batch = build([sample(0, reward=1.0), sample(1, reward=0.0), failed])[0]
    without = build([sample(0, reward=1.0), sample(1, reward=0.0)])[0]
    assert [s.sample_id for s in batch.samples] == [0, 1]
    assert [s.reward for s in batch.samples] == [s.reward for s in without.samples]
    assert batch.steps == without.steps


def test_all_failed_is_an_error_of_its_own() -> None:
    with pytest.raises(GenerationError, match="rollout step 4: none of 2 samples"):
        build([sample(i, status=Sample.Status.FAILED) for i in range(2)])


def test_a_removed_sample_counts_in_its_group_but_not_in_the_loss() -> None:
    batch = build([sample(0, reward=1.0, remove_sample=True), sample(1, reward=0.0)])[0]
    removed, other = sorted(batch.samples, key=lambda s: s.sample_id)
    assert (removed.loss_mask.sum(), removed.rollout_mask_sum) == (0.0, 0.0)
    assert other.reward < -0.7
    assert (batch.steps[0].num_rollouts, batch.steps[0].num_tokens) == (2, 3.0)


def test_segments_of_a_rollout_share_reward_step_and_mask_sum() -> None:
    samples = [sample(0, rollout_id=0), sample(1, rollout_id=0, response=5), sample(2, rollout_id=2, reward=0.0)]
    found = {s.sample_id: s for s in build(samples)[0].samples}
    assert (found[0].rollout_mask_sum, found[1].rollout_mask_sum, found[2].rollout_mask_sum) == (8.0, 8.0, 3.0)
    assert found[0].reward == found[1].reward == pytest.approx(-found[2].reward)


def test_processed_rewards_replace_the_normalisation() -> None:
    batch = build([sample(0, status=Sample.Status.FAILED), sample(1, group=None)], processed_rewards=([9.0, 1.0], [9.0, 0.25]))[0]
    assert [(s.raw_reward, s.reward) for s in batch.samples] == [(1.0, 0.25)]


def test_without_advantages_no_reward_is_needed() -> None:
    batch = build([sample(0, reward=None, group=None)], algorithm=AlgorithmConfig(compute_advantages_and_returns=False))[0]
    assert batch.samples[0].reward == 0.0


def test_a_dict_reward_is_read_by_its_key() -> None:
    batch = build([sample(0, reward={"score": 0.5})], reward=RewardConfig(reward_key="score"), args=SimpleNamespace(reward_key="score"))[0]
    assert batch.samples[0].raw_reward == 0.5


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "good", [1.0, 2.0]])
def test_a_reward_that_is_no_finite_number_names_sample_label_and_value(value: Any) -> None:
    with pytest.raises(RewardError) as caught:
        build([sample(0), sample(17, reward=value)])
    assert all(part in str(caught.value) for part in ("sample 17", "'seven'", repr(value), "finite number"))


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (sample(7, reward={"a": 1.0}), RewardError, "sample 7 .*--reward-key"),
        (sample(7, response_length=9), DataError, "sample 7 .*response_length is 9"),
        (sample(7, tokens=[], response_length=0), DataError, "sample 7 .*0 tokens"),
        (sample(7, loss_mask=[1, 1]), DataError, "sample 7 .*loss_mask has 2 values for 3"),
        (sample(7, loss_mask=[1, 2, 0]), DataError, "sample 7 .*only 0 and 1"),
        (sample(7, rollout_log_probs=[-1.0]), DataError, "sample 7 .*rollout_log_probs has 1 values for 3"),
        (sample(7, rollout_log_probs=[-1.0, math.nan, 0.0]), DataError, r"sample 7 .*rollout_log_probs\[1\] is nan"),
        (sample(7, group=None), DataError, "sample 7 .*no group_index"),
        (sample(None), DataError, "neither index nor rollout_id"),
    ],
)
def test_bad_samples_are_named(bad: Sample, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build([bad])


def test_one_rollout_id_in_two_groups_is_refused() -> None:
    mixed = [sample(0, group=0, rollout_id=0), sample(1, group=0, rollout_id=1), sample(2, group=5, rollout_id=0)]
    with pytest.raises(DataError, match=r"rollout_id 0 is used in group 0 \(sample 0\) and in group 5 \(sample 2\).*sample\.index"):
        build(mixed)
    mixed[2].rollout_id = None  # then it is its index
    (batch,) = build(mixed)
    assert [one.rollout_mask_sum for one in batch.samples] == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        ([2, 3], [0, 1, 2], "must be 4 ascending numbers from 0 to the 2 rollout_top_p_token_ids"),
        ([2, 3, 4], [0, 1, 2, 4], "must be 4 ascending numbers"),
        ([2, 2, 4], [0, 1, 2, 3], "response token 1 is 3, which is not among the 1 tokens"),
    ],
)
def test_kept_tokens_that_do_not_fit_are_refused(ids: list[int], offsets: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build([sample(0, rollout_top_p_token_ids=ids, rollout_top_p_token_offsets=offsets)])


def test_kept_tokens_go_along_and_tool_tokens_have_none() -> None:
    one = Sample(index=0, group_index=0, tokens=[0, 1], reward=1.0, status=Sample.Status.COMPLETED)
    one.append_response_tokens(tokens=[5, 6], log_probs=[-1.0, -1.0], kept=[[4, 5], [6]])
    one.append_response_tokens(tokens=[9], trainable=False)
    one.append_response_tokens(tokens=[7], log_probs=[-1.0], kept=[[7, 8]])
    (batch,) = build([one])
    assert batch.samples[0].kept_ids is not None
    assert batch.samples[0].kept_offsets is not None
    assert batch.samples[0].kept_ids.tolist() == [4, 5, 6, 7, 8]
    assert batch.samples[0].kept_offsets.tolist() == [0, 2, 3, 3, 5]


def test_log_probs_for_a_part_of_the_samples_are_refused() -> None:
    with pytest.raises(DataError, match=r"sample 1 .*1 of 2 samples"):
        build([sample(0, rollout_log_probs=[-1.0] * 3), sample(1)])
    batch = build([sample(0, rollout_log_probs=[-1.0] * 3), sample(1, response=0)])[0]
    assert all(s.rollout_log_probs is not None for s in batch.samples)


@pytest.mark.parametrize(
    ("processed", "message"), [(([1.0], [1.0]), "1 rewards for 2 samples"), (([1.0, 1.0], [1.0, math.nan]), "nan for sample 1")]
)
def test_bad_processed_rewards_are_refused(processed: tuple[list[float], list[float]], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        build([sample(0), sample(1)], processed_rewards=processed)


def test_a_rank_without_enough_samples_gets_a_filler_that_weighs_nothing() -> None:
    batches = build([sample(0, response=3, rollout_log_probs=[-1.0] * 3)], dp_size=2)
    filler = batches[1].samples[0]
    assert (filler.sample_id, filler.rollout_mask_sum, filler.loss_mask.tolist(), filler.length) == (FILLER_ID, 0.0, [0.0], 2)
    assert batches[1].steps == batches[0].steps
    assert packing_metrics(batches, BUDGET)["perf/packing_fillers"] == 1.0


def test_a_sample_over_the_budget_is_alone_counted_and_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    batches = build([sample(0, response=60), sample(1), sample(2)])
    assert sorted(len(micro) for micro in batches[0].steps[0].micro_batches) == [1, 2]
    assert packing_metrics(batches, BUDGET)["perf/packing_over_budget"] == 1.0
    assert "1 of 3 samples are longer than the 32 tokens of a micro-batch (longest: sample 0 with 62 tokens)" in caplog.text


def test_a_sample_over_the_budget_ends_the_run_where_that_is_asked_for() -> None:
    data = replace(BUDGET, over_budget_samples="fail")
    build([sample(0, response=30)], data)
    with pytest.raises(DataError, match=r"1 of 2 samples are longer than the 32 tokens.*sample 0 with 33.*Raise --max-tokens-per-gpu"):
        build([sample(0, response=31), sample(1)], data)


def test_metrics_of_a_known_split() -> None:
    metrics = packing_metrics(build([sample(i, response=14) for i in range(4)], dp_size=2), BUDGET)
    assert metrics["perf/packing_efficiency"] == 1.0
    assert metrics["perf/packing_dp_imbalance"] == pytest.approx(0.0)
    assert metrics["perf/packing_micro_batches"] == 1.0


def test_a_budget_is_needed_for_dynamic_batches() -> None:
    with pytest.raises(ConfigError, match="--max-tokens-per-gpu"):
        build([sample(0)], DataConfig(use_dynamic_batch_size=True))


def test_ranks_train_their_costliest_micro_batches_first() -> None:
    """Ranks that wait for one another after each micro-batch then wait for one of like cost."""
    lengths = [30_000, 10_000, 10_000, 9_000, 500, 400, 300, 200] * 4
    data = DataConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=30_100)
    for batch in build([sample(i, response=n) for i, n in enumerate(lengths)], data, dp_size=2):
        costs = [sum(sequence_cost(batch.samples[i].length) for i in micro) for micro in batch.steps[0].micro_batches]
        assert costs == sorted(costs, reverse=True)
        assert len(costs) > 2


def test_samples_of_one_prompt_stay_in_one_micro_batch() -> None:
    generator = np.random.default_rng(0)
    prompts = [list(range(10 * g, 10 * g + 8)) for g in range(16)]
    samples = [
        sample(4 * g + i, group=g, tokens=prompts[g] + [1] * n, response_length=n)
        for i in range(4)
        for g, n in enumerate(generator.integers(1, 5, 16).tolist())
    ]
    (batch,) = build(samples, DataConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=200))
    micro_of = [{batch.samples[i].group_id for i in micro} for micro in batch.steps[0].micro_batches]
    assert len(micro_of) == 4
    assert sum(len(groups) for groups in micro_of) == 16


def test_a_group_is_split_where_a_rank_would_wait_for_it() -> None:
    samples = [sample(i, response=30) for i in range(4)]
    batches = build(samples, DataConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=200), dp_size=2)
    assert [len(batch.samples) for batch in batches] == [2, 2]


def test_a_group_above_the_budget_is_split_within_it() -> None:
    (batch,) = build([sample(i, response=8) for i in range(5)])
    assert [len(micro) for micro in batch.steps[0].micro_batches] == [3, 2]
