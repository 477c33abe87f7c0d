"""Further metrics of a step's samples, each behind a flag: pass@k, turns, reward categories, the correct samples alone.

A sample is correct when its reward is 1. Samples that could not be had (FAILED) are left out.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from vime.errors import RewardError
from vime.utils.types import Sample

__all__ = ["pass_at_k", "pass_rates", "sample_statistics"]

PARTS = 4  # of --rollout-max-response-len, by which the correct responses are counted


def sample_statistics(args: Any, samples: Sequence[Sample]) -> dict[str, float]:
    """What the --log-... flags ask for.

    passrate/pass@{k}                     --log-passrate: k = 1, 2, 4, ... up to the smallest group; mean over groups
    multi_turn/{turns,response_length,sampled_length}/{mean,max,min}  --log-multi-turn: turns of the model; tokens with and
                                          without what tools said
    rollout/error_cat/{value}             --log-reward-category: share of samples with that value in their dict reward
    rollout/correct_samples               --log-correct-samples: share of samples with reward 1
    rollout/correct_response_lengths      their mean length in tokens
    rollout/correct_entropy               mean over them of -log-prob of a sampled token
    rollout/correct_length/p{25,50,75,100}  share of them in each quarter of --rollout-max-response-len

    Raises RewardError when --log-reward-category names what is not in a sample's reward.
    """
    good = [sample for sample in samples if sample.status is not Sample.Status.FAILED]
    found: dict[str, float] = {}
    if not good:
        return found
    if args.log_passrate:
        found |= _pass_rate(args, good)
    if args.log_multi_turn:
        found |= _turns(good)
    if args.log_reward_category is not None:
        found |= _categories(args.log_reward_category, good)
    if args.log_correct_samples:
        found |= _correct(args, good)
    return found


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that k of `num_samples` drawn without replacement hold a correct one (Chen et al. 2021, equation 1)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_rates(groups: Sequence[Sequence[bool]]) -> dict[int, float]:
    """k = 1, 2, 4, ... up to the smallest group -> mean of `pass_at_k` over the groups; a group says which answers are correct."""
    smallest = min(map(len, groups))
    powers = itertools.takewhile(lambda k: k <= smallest, (2**n for n in itertools.count()))
    return {k: statistics.fmean(pass_at_k(len(group), sum(group), k) for group in groups) for k in powers}


def _is_correct(args: Any, sample: Sample) -> bool:
    return sample.get_reward_value(args) == 1.0


def _pass_rate(args: Any, samples: Sequence[Sample]) -> dict[str, float]:
    """By group; the segments of one execution are correct when one of them is."""
    groups: dict[Any, dict[Any, bool]] = defaultdict(dict)
    for sample in samples:
        execution = sample.index if sample.rollout_id is None else sample.rollout_id
        of_group = groups[sample.group_index]
        of_group[execution] = of_group.get(execution, False) or _is_correct(args, sample)
    return {f"passrate/pass@{k}": rate for k, rate in pass_rates([list(members.values()) for members in groups.values()]).items()}


def _turns(samples: Sequence[Sample]) -> dict[str, float]:
    values = {
        "turns": [_num_turns(sample) for sample in samples],
        "response_length": [sample.response_length for sample in samples],
        "sampled_length": [sample.effective_response_length for sample in samples],
    }
    return {
        f"multi_turn/{name}/{kind}": float(of(numbers))
        for name, numbers in values.items()
        for kind, of in (("mean", statistics.fmean), ("max", max), ("min", min))
    }


def _num_turns(sample: Sample) -> int:
    """`metadata["round_number"]` when the generate function counts, else stretches of trained tokens."""
    if "round_number" in sample.metadata:
        return int(sample.metadata["round_number"])
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    return sum(1 for trained, _ in itertools.groupby(mask) if trained)


def _categories(key: str, samples: Sequence[Sample]) -> dict[str, float]:
    counts: Counter[Any] = Counter()
    for sample in samples:
        if not isinstance(sample.reward, dict) or key not in sample.reward:
            raise RewardError(
                f"--log-reward-category {key}: the reward of sample {sample.index} is {sample.reward!r}, which has no entry '{key}'. "
                "Let the reward give a dict with it, or leave the flag out."
            )
        counts[sample.reward[key]] += 1
    return {f"rollout/error_cat/{value}": count / len(samples) for value, count in counts.items()}


def _correct(args: Any, samples: Sequence[Sample]) -> dict[str, float]:
    correct = [sample for sample in samples if _is_correct(args, sample)]
    found = {"rollout/correct_samples": len(correct) / len(samples)}
    if not correct:
        return found
    lengths = [sample.response_length for sample in correct]
    found["rollout/correct_response_lengths"] = statistics.fmean(lengths)
    quarter = args.rollout_max_response_len / PARTS
    parts = Counter(min(max(math.ceil(length / quarter), 1), PARTS) for length in lengths)
    found |= {f"rollout/correct_length/p{100 * part // PARTS}": parts[part] / len(correct) for part in range(1, PARTS + 1)}
    entropies = [value for sample in correct if (value := _entropy(sample)) is not None]
    if entropies:
        found["rollout/correct_entropy"] = statistics.fmean(entropies)
    return found


def _entropy(sample: Sample) -> float | None:
    """-log-prob of a sampled token, mean over the response; None where the engine's log-probs are not known."""
    if not sample.rollout_log_probs:
        return None
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    values = [-value for value, trained in zip(sample.rollout_log_probs, mask, strict=True) if trained]
    return statistics.fmean(values) if values else None
