"""From the samples of one rollout step to what each data-parallel rank trains on.

    samples ─▶ checked, rewards normalised (convert.py)
            ─▶ optimizer steps: whole rollouts, in order, as even as they come
            ─▶ per step: ranks of equal cost ─▶ per rank: micro-batches within the token budget

All ranks get the same number of micro-batches in a step. Where a rank has too few samples for that, a filler stands in: two
tokens, nothing trained, weight 0. Nothing is dropped, and the step's mean does not depend on the split.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vime.config.sections import AlgorithmConfig, DataConfig, RewardConfig
from vime.errors import ConfigError, DataError, GenerationError
from vime.packing.balance import best_fit, even_bins, sequence_cost, spread
from vime.packing.convert import ProcessedRewards, to_train_samples
from vime.packing.own_data import from_train_data
from vime.types import FILLER_ID, MicroBatch, StepPlan, TrainBatch, TrainSample
from vime.utils.types import Sample

__all__ = ["build_train_batches", "packing_metrics"]

logger = logging.getLogger(__name__)

TOGETHER_COSTS = 1.02  # how much slower the slowest rank may get so that samples of one prompt stay together


def build_train_batches(
    samples: Sequence[Sample],
    *,
    rollout_id: int,
    data: DataConfig,
    algorithm: AlgorithmConfig,
    reward: RewardConfig,
    dp_size: int,
    args: Any,
    processed_rewards: ProcessedRewards | None = None,
    train_data: Any = None,
) -> list[TrainBatch]:
    """One TrainBatch per data-parallel rank. Deterministic in its arguments.

    FAILED samples are left out. With n rollouts and --global-batch-size g there are round(n / g) optimizer steps (at least
    one) whose sizes differ by one rollout at most, so a remainder neither is dropped nor makes a small, noisy step of its
    own; each step's mean divides by the rollouts it really has. All segments of a rollout are in one step.

    `args` is the flat view that `Sample.get_reward_value` is called with; `processed_rewards` the (raw, rewards) of
    --custom-reward-post-process-path for `samples`, `train_data` the dict of --custom-convert-samples-to-train-data-path, which
    replaces the conversion (`vime.packing.own_data`). Raises RewardError, DataError, or GenerationError when no sample is left.
    """
    if train_data is not None:
        trained = from_train_data(train_data, samples)
    else:
        trained = to_train_samples(samples, algorithm=algorithm, reward=reward, args=args, processed_rewards=processed_rewards)
    if not trained:
        raise GenerationError(
            f"rollout step {rollout_id}: none of {len(samples)} samples can be trained on (all FAILED); see the log for why they failed."
        )
    budget = _budget(data)
    if budget is not None:
        _check_over_budget(trained, budget, fail=data.over_budget_samples == "fail")
    of_ranks: list[list[TrainSample]] = [[] for _ in range(dp_size)]
    plans: list[list[StepPlan]] = [[] for _ in range(dp_size)]
    for members in _steps(trained, data):
        num_rollouts = len({sample.rollout_id for sample in members})
        num_tokens = float(sum(sample.loss_mask.sum() for sample in members))
        for rank, bins in enumerate(_split(members, dp_size, budget, data.micro_batch_size)):
            micro_batches: list[MicroBatch] = []
            for content in bins:
                first = len(of_ranks[rank])
                of_ranks[rank].extend(content)
                micro_batches.append(tuple(range(first, first + len(content))))
            plans[rank].append(
                StepPlan(micro_batches=tuple(micro_batches), num_rollouts=num_rollouts, num_tokens=num_tokens, num_sequences=len(members))
            )
    return [TrainBatch(rollout_id=rollout_id, samples=tuple(mine), steps=tuple(steps)) for mine, steps in zip(of_ranks, plans, strict=True)]


def packing_metrics(batches: Sequence[TrainBatch], data: DataConfig) -> dict[str, float]:
    """How well the step is packed, over all ranks.

    perf/packing_micro_batches     micro-batches per rank
    perf/packing_efficiency        tokens / (micro-batches x budget), with --use-dynamic-batch-size
    perf/packing_dp_imbalance      share by which the slowest rank's cost exceeds the mean: what the others wait
    perf/packing_over_budget       samples longer than the budget
    perf/packing_fillers           micro-batches that hold nothing but a filler
    """
    budget = _budget(data)
    slowest = mean = 0.0
    for step in range(len(batches[0].steps)):
        costs = [sum(sequence_cost(b.samples[i].length) for micro in b.steps[step].micro_batches for i in micro) for b in batches]
        slowest += max(costs)
        mean += sum(costs) / len(costs)
    samples = [sample for batch in batches for sample in batch.samples]
    micro_batches = sum(len(plan.micro_batches) for batch in batches for plan in batch.steps)
    metrics = {
        "perf/packing_micro_batches": micro_batches / len(batches),
        "perf/packing_dp_imbalance": slowest / mean - 1.0,
        "perf/packing_fillers": float(sum(sample.sample_id == FILLER_ID for sample in samples)),
    }
    if budget is not None:
        metrics["perf/packing_efficiency"] = sum(sample.length for sample in samples) / (micro_batches * budget)
        metrics["perf/packing_over_budget"] = float(sum(sample.length > budget for sample in samples))
    return metrics


def _budget(data: DataConfig) -> int | None:
    """Tokens of one micro-batch, or None when micro-batches are counted in samples."""
    if not data.use_dynamic_batch_size:
        return None
    if data.max_tokens_per_gpu is None:
        raise ConfigError("--use-dynamic-batch-size needs --max-tokens-per-gpu, the token budget of one micro-batch.")
    return data.max_tokens_per_gpu


def _check_over_budget(samples: Sequence[TrainSample], budget: int, *, fail: bool) -> None:
    """One sentence for all samples that do not fit: a warning, or with `fail` a DataError."""
    long = [sample for sample in samples if sample.length > budget]
    if not long:
        return
    worst = max(long, key=lambda sample: sample.length)
    said = (
        f"{len(long)} of {len(samples)} samples are longer than the {budget} tokens of a micro-batch "
        f"(longest: sample {worst.sample_id} with {worst.length} tokens)"
    )
    cure = "Raise --max-tokens-per-gpu or lower --rollout-max-response-len"
    if fail:
        raise DataError(f"{said}, and --over-budget-samples is fail. {cure}, or let them stand alone.")
    logger.warning("%s; each gets a micro-batch of its own and may run out of memory. %s.", said, cure)


def _steps(samples: Sequence[TrainSample], data: DataConfig) -> list[list[TrainSample]]:
    """Optimizer steps: whole rollouts in order of appearance; see `build_train_batches` on the remainder."""
    rollouts: dict[int, list[TrainSample]] = {}
    for sample in samples:
        rollouts.setdefault(sample.rollout_id, []).append(sample)
    count = len(rollouts)
    if data.num_steps_per_rollout is not None:
        wanted = data.num_steps_per_rollout
    elif data.global_batch_size is not None:
        wanted = (2 * count + data.global_batch_size) // (2 * data.global_batch_size)  # round half up
    else:
        wanted = 1
    num_steps = max(1, min(wanted, count))
    ordered = list(rollouts.values())
    bounds = [count * step // num_steps for step in range(num_steps + 1)]
    return [[s for rollout in ordered[a:b] for s in rollout] for a, b in itertools.pairwise(bounds)]


def _split(samples: list[TrainSample], dp_size: int, budget: int | None, micro_batch_size: int) -> list[list[list[TrainSample]]]:
    """Micro-batches of each rank: [dp_size][k][...], none empty, the costlier ones first.

    Within a token budget samples of one prompt stay together, so that a trainer can compute the prompt once, unless that takes
    more micro-batches or makes the slowest rank noticeably slower.
    """
    ranks = _deal([[sample] for sample in samples], dp_size, budget, micro_batch_size)
    if budget is not None:
        together = _deal(_of_one_prompt(samples, budget), dp_size, budget, micro_batch_size)
        if len(together[0]) == len(ranks[0]) and _slowest(together) <= TOGETHER_COSTS * _slowest(ranks):
            ranks = together
    return [[micro or [_filler(samples[0])] for micro in micros] for micros in ranks]


def _deal(units: list[list[TrainSample]], dp_size: int, budget: int | None, micro_batch_size: int) -> list[list[list[TrainSample]]]:
    """`_split` for units that stay whole (of one sample each without `budget`); micro-batches that lack samples are empty."""
    max_items = -(-len(units) // dp_size) if budget is None else None
    ranks = spread([sum(sequence_cost(s.length) for s in unit) for unit in units], dp_size, max_items=max_items)
    assert ranks is not None  # dp_size x max_items holds all
    lengths = [[sum(s.length for s in units[i]) for i in rank] for rank in ranks]
    if budget is not None:
        count = max(len(best_fit(of, budget)) for of in lengths)
    else:
        count = max(-(-len(of) // micro_batch_size) for of in lengths)
    out = []
    for rank, of in zip(ranks, lengths, strict=True):
        bins = even_bins(of, count, budget=budget, max_items=None if budget is not None else micro_batch_size) if of else []
        contents = [[sample for i in members for sample in units[rank[i]]] for members in bins]
        contents.sort(key=lambda content: -sum(sequence_cost(s.length) for s in content))  # ranks that wait for one another find equals
        out.append(contents + [[] for _ in range(count - len(contents))])
    return out


def _of_one_prompt(samples: list[TrainSample], budget: int) -> list[list[TrainSample]]:
    """Samples of one group with equal prompts in one list, as long as it stays within `budget` tokens."""
    units: list[list[TrainSample]] = []
    filling: dict[tuple[int, bytes], list[TrainSample]] = {}
    for sample in samples:
        key = (sample.group_id, sample.tokens[: sample.length - sample.response_length].tobytes())
        unit = filling.get(key)
        if unit is None or sum(s.length for s in unit) + sample.length > budget:
            unit = filling[key] = []
            units.append(unit)
        unit.append(sample)
    return units


def _slowest(ranks: list[list[list[TrainSample]]]) -> float:
    """Cost of the rank that has most to do."""
    return max(sum(sequence_cost(sample.length) for micro in micros for sample in micro) for micros in ranks)


def _filler(like: TrainSample) -> TrainSample:
    """Two tokens of a real sample with nothing trained: weight 0 in every mean."""
    nothing = np.zeros(1, dtype=np.float32)
    return replace(
        like,
        tokens=like.tokens[:2] if like.length > 1 else np.repeat(like.tokens, 2),
        response_length=1,
        loss_mask=nothing,
        reward=0.0,
        raw_reward=0.0,
        sample_id=FILLER_ID,
        group_id=FILLER_ID,
        rollout_id=FILLER_ID,
        rollout_mask_sum=0.0,
        rollout_log_probs=None if like.rollout_log_probs is None else nothing,
        weight_versions=None if like.weight_versions is None else nothing - 1,
        teacher_log_probs=None if like.teacher_log_probs is None else nothing,
        kept_ids=None,
        kept_offsets=None,
        routed_experts=None,
        truncated=False,
        metadata=None,
    )
