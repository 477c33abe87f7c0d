"""`Sample` (what users' functions work on) to `TrainSample` (what trainers get): checked, with group-normalised rewards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.algorithms.group_norm import normalize_group_rewards
from vime.algorithms.overlong import overlong_penalty
from vime.algorithms.registry import ADVANTAGES
from vime.config.sections import AlgorithmConfig, RewardConfig
from vime.errors import DataError, RewardError
from vime.packing.routing import joined
from vime.types import TrainSample
from vime.utils.types import Sample

__all__ = ["ProcessedRewards", "to_train_samples"]

ProcessedRewards = tuple[Sequence[float], Sequence[float]]  # (raw, normalised), one of each for every sample


def to_train_samples(
    samples: Sequence[Sample],
    *,
    algorithm: AlgorithmConfig,
    reward: RewardConfig,
    args: Any,
    processed_rewards: ProcessedRewards | None = None,
) -> list[TrainSample]:
    """The samples that are trained on, in the order given. FAILED ones are left out here, and so of all statistics.

    `processed_rewards` is what --custom-reward-post-process-path returned for `samples`, in their order: it replaces the
    group normalisation. Raises RewardError (not a finite number) or DataError (ids, lengths, masks, log-probs), naming the
    sample.
    """
    kept = [position for position, sample in enumerate(samples) if sample.status is not Sample.Status.FAILED]
    chosen = [samples[position] for position in kept]
    masks = [_mask(sample) for sample in chosen]
    rollout_ids = [_rollout_id(sample) for sample in chosen]
    _check_one_group_each(chosen, rollout_ids)
    if processed_rewards is not None:
        raw, rewards = (_pick(values, kept, samples) for values in processed_rewards)
    else:
        raw = [_reward(sample, reward, args, needed=algorithm.compute_advantages_and_returns) for sample in chosen]
        rewards = _normalised(chosen, _shaped(chosen, raw, rollout_ids, reward, args), rollout_ids, algorithm)
    rollout_log_probs = _per_token(chosen, "rollout_log_probs")
    teacher_log_probs = _per_token(chosen, "teacher_log_probs")
    kept_tokens = [_kept(sample, mask) for sample, mask in zip(chosen, masks, strict=True)]
    mask_sums: dict[int, float] = defaultdict(float)
    for rollout_id, mask in zip(rollout_ids, masks, strict=True):
        mask_sums[rollout_id] += float(mask.sum())
    return [
        TrainSample(
            tokens=np.asarray(sample.tokens, dtype=np.int64),
            response_length=sample.response_length,
            loss_mask=mask,
            reward=rewards[i],
            raw_reward=raw[i],
            sample_id=rollout_ids[i] if sample.index is None else sample.index,
            group_id=rollout_ids[i] if sample.group_index is None else sample.group_index,
            rollout_id=rollout_ids[i],
            rollout_mask_sum=mask_sums[rollout_ids[i]],
            rollout_log_probs=rollout_log_probs[i],
            teacher_log_probs=teacher_log_probs[i],
            kept_ids=kept_tokens[i][0],
            kept_offsets=kept_tokens[i][1],
            weight_versions=_weight_versions(sample),
            routed_experts=_routed(sample, mask) if algorithm.use_rollout_routing_replay else None,
            truncated=sample.status is Sample.Status.TRUNCATED,
            metadata=sample.train_metadata,
        )
        for i, (sample, mask) in enumerate(zip(chosen, masks, strict=True))
    ]


def _name(sample: Sample) -> str:
    """How messages call a sample."""
    return f"sample {sample.index} (group {sample.group_index})"


def _rollout_id(sample: Sample) -> int:
    """Its execution."""
    found = sample.index if sample.rollout_id is None else sample.rollout_id
    if found is None:
        raise DataError("a sample has neither index nor rollout_id; keep the ids that the data source gave it when you copy a sample.")
    return found


def _check_one_group_each(samples: Sequence[Sample], rollout_ids: Sequence[int]) -> None:
    """An execution belongs to one group: its samples share one mean in the loss, which strangers would dilute."""
    owner: dict[int, Sample] = {}
    for sample, rollout_id in zip(samples, rollout_ids, strict=True):
        first = owner.setdefault(rollout_id, sample)
        if first.group_index != sample.group_index:
            raise DataError(
                f"rollout_id {rollout_id} is used in group {first.group_index} (sample {first.index}) and in group {sample.group_index} "
                f"(sample {sample.index}), but samples with one rollout_id are segments of one execution, and share its weight in the "
                "loss. Leave rollout_id unset, or set it to sample.index or any id that is unique over the step."
            )


def _mask(sample: Sample) -> npt.NDArray[np.float32]:
    """[R] float32 of zeros and ones; all zeros when the sample is to be removed."""
    response = sample.response_length
    if not 0 <= response < len(sample.tokens):
        raise DataError(
            f"{_name(sample)}: response_length is {response} but it has {len(sample.tokens)} tokens; "
            "tokens must hold the prompt (at least one token) and then the response."
        )
    if sample.remove_sample:
        return np.zeros(response, dtype=np.float32)
    if sample.loss_mask is None:
        return np.ones(response, dtype=np.float32)
    mask = np.asarray(sample.loss_mask, dtype=np.float32)
    if mask.shape != (response,):
        raise DataError(f"{_name(sample)}: loss_mask has {len(sample.loss_mask)} values for {response} response tokens.")
    if not np.isin(mask, (0, 1)).all():
        raise DataError(f"{_name(sample)}: loss_mask may hold only 0 and 1.")
    return mask


def _per_token(samples: Sequence[Sample], field: str) -> list[npt.NDArray[np.float32] | None]:
    """A per-token field of all samples, each [R] float32 and finite; None for all when none has it.

    A batch of which only a part has log-probs cannot be corrected or compared evenly, so that is refused; a sample without
    response needs none.
    """
    lacking = [sample for sample in samples if getattr(sample, field) is None]
    if len(lacking) == len(samples):
        return [None] * len(samples)
    without = [sample for sample in lacking if sample.response_length]
    if without:
        raise DataError(
            f"{_name(without[0])} has no {field}, as have {len(without)} of {len(samples)} samples; give it to all of them or to none."
        )
    return [_finite_values(sample, field) for sample in samples]


def _finite_values(sample: Sample, field: str) -> npt.NDArray[np.float32]:
    """One sample's [R] values."""
    array = np.asarray([] if getattr(sample, field) is None else getattr(sample, field), dtype=np.float32)
    if array.shape != (sample.response_length,):
        raise DataError(f"{_name(sample)}: {field} has {len(array)} values for {sample.response_length} response tokens.")
    if not np.isfinite(array).all():
        at = int(np.argmin(np.isfinite(array)))
        raise DataError(f"{_name(sample)}: {field}[{at}] is {array[at]}, not a finite number.")
    return array


def _kept(sample: Sample, mask: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.int64] | None]:
    """(ids [K], offsets [R + 1]) of the tokens that each response token was drawn from; every trained token must be among its own."""
    if sample.rollout_top_p_token_offsets is None:
        return None, None
    ids = np.asarray(sample.rollout_top_p_token_ids or [], dtype=np.int32)
    offsets = np.asarray(sample.rollout_top_p_token_offsets, dtype=np.int64)
    counts = np.diff(offsets)
    if len(offsets) != sample.response_length + 1 or offsets[0] != 0 or offsets[-1] != len(ids) or (counts < 0).any():
        raise DataError(
            f"{_name(sample)}: rollout_top_p_token_offsets must be {sample.response_length + 1} ascending numbers from 0 to the "
            f"{len(ids)} rollout_top_p_token_ids; use Sample.append_response_tokens(kept=...)."
        )
    tokens = np.asarray(sample.tokens[len(sample.tokens) - sample.response_length :], dtype=np.int64)
    found = np.zeros(sample.response_length, dtype=bool)
    found[np.repeat(np.arange(sample.response_length), counts)[ids == np.repeat(tokens, counts)]] = True
    wrong = (mask > 0) & (counts > 0) & ~found
    if wrong.any():
        at = int(np.argmax(wrong))
        raise DataError(
            f"{_name(sample)}: response token {at} is {tokens[at]}, which is not among the {counts[at]} tokens it was drawn from."
        )
    return ids, offsets


def _routed(sample: Sample, mask: npt.NDArray[np.float32]) -> npt.NDArray[np.int16] | None:
    """[t, layers, k]: the routing of the tokens that predict the trained ones is there; None where nothing is trained."""
    if not mask.any():
        return None
    needed = len(sample.tokens) - len(mask) + int(mask.nonzero()[0][-1])
    if not sample.rollout_routed_experts:
        raise DataError(
            f"{_name(sample)} has no rollout_routed_experts, which --use-rollout-routing-replay trains with. A generate function of your "
            "own hands the reply's routed_experts to Sample.append_response_tokens."
        )
    try:
        found = joined(sample.rollout_routed_experts)
    except DataError as error:
        raise DataError(f"{_name(sample)}: {error}") from error
    if not needed <= len(found) < len(sample.tokens):
        raise DataError(
            f"{_name(sample)}: rollout_routed_experts covers {len(found)} of {len(sample.tokens)} tokens; expected at least the {needed} "
            "before the last trained one, and not the last of all."
        )
    return found


def _weight_versions(sample: Sample) -> npt.NDArray[np.float32]:
    """[R]; -1 where the sample names no version, or one that is no number."""
    if len(sample.weight_versions) != sample.response_length:
        return np.full(sample.response_length, -1, dtype=np.float32)
    return np.array([int(v) if v.isdecimal() else -1 for v in sample.weight_versions], dtype=np.float32)


def _reward(sample: Sample, reward: RewardConfig, args: Any, *, needed: bool) -> float:
    """The reward as a finite number."""
    if sample.reward is None and not needed:
        return 0.0
    if isinstance(sample.reward, dict) and (reward.reward_key is None or reward.reward_key not in sample.reward):
        raise RewardError(
            f"{_name(sample)}: the reward is a dict with {sorted(map(str, sample.reward))}, and --reward-key is {reward.reward_key}; "
            "set --reward-key to one of them."
        )
    try:
        number = sample.get_reward_value(args)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(
            f"{_name(sample)}, label {sample.label!r}: the reward is {sample.reward!r}; expected a finite number. A sample that cannot "
            "be scored must get status FAILED, which leaves it out of its group's statistics."
        )
    return number


def _pick(values: Sequence[float], kept: Sequence[int], samples: Sequence[Sample]) -> list[float]:
    """The hook's values of the samples that are kept."""
    if len(values) != len(samples):
        raise RewardError(f"--custom-reward-post-process-path returned {len(values)} rewards for {len(samples)} samples; return one each.")
    for position in kept:
        if not math.isfinite(values[position]):
            raise RewardError(
                f"--custom-reward-post-process-path returned {values[position]!r} for {_name(samples[position])}; expected a finite number."
            )
    return [float(values[position]) for position in kept]


def _shaped(samples: Sequence[Sample], raw: list[float], rollout_ids: list[int], reward: RewardConfig, args: Any) -> list[float]:
    """With --overlong-buffer-len: less for rollouts whose longest response comes near --rollout-max-response-len."""
    margin = reward.overlong_buffer_len
    if margin is None:
        return raw
    longest: dict[int, int] = defaultdict(int)
    for rollout_id, sample in zip(rollout_ids, samples, strict=True):
        longest[rollout_id] = max(longest[rollout_id], sample.response_length)
    limit, factor = args.rollout_max_response_len, reward.overlong_penalty_factor
    return [
        value + factor * overlong_penalty(longest[rollout_id], max_length=limit, margin=margin)
        for value, rollout_id in zip(raw, rollout_ids, strict=True)
    ]


def _normalised(samples: Sequence[Sample], raw: list[float], rollout_ids: list[int], algorithm: AlgorithmConfig) -> list[float]:
    """What the advantage estimator starts from."""
    comparison = ADVANTAGES[algorithm.advantage_estimator].comparison
    if comparison is None or not (algorithm.compute_advantages_and_returns and algorithm.rewards_normalization):
        return raw
    if comparison == "mean_std" and not algorithm.grpo_std_normalization:
        comparison = "mean"
    groups: list[int] = []
    for sample in samples:
        if sample.group_index is None:
            raise DataError(
                f"{_name(sample)} has no group_index, so there is nothing to compare its reward with; keep the group_index that the "
                "data source gave it, or use --disable-rewards-normalization."
            )
        groups.append(sample.group_index)
    return normalize_group_rewards(raw, groups, rollout_ids, comparison=comparison).tolist()
