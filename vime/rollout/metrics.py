"""What is logged of a rollout, under slime's names."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from vime.rollout.base_types import Group
from vime.rollout.generation import segments, usable
from vime.rollout.statistics import pass_rates
from vime.utils.types import Sample

__all__ = ["clustered_standard_error", "eval_metrics", "rollout_metrics"]


def rollout_metrics(args: Any, groups: Sequence[Group], *, seconds: float, version: int | None = None) -> dict[str, float]:
    """Metrics of the groups that are trained on, by weights of `version` (None: of the newest token's).

    rollout/response_len/{mean,median,max,min}  generated and tool tokens of a response
    rollout/total_tokens            response tokens of all samples
    rollout/truncated_ratio         share of samples that reached the length limit
    rollout/raw_reward              mean reward
    rollout/zero_std/count_{r}      groups whose members all got r
    rollout/failed_samples          members that could not be had, in groups that were kept
    rollout/staleness/{mean,max}    weight versions from a sample's oldest token to the weights that are trained, over samples
    rollout/mixed_versions          share of samples with tokens of several weight versions
    rollout/top_p_kept_vocab_per_token  tokens that top-k and top-p sampling left to choose from, mean over sampled tokens
    perf/tokens_per_gpu_per_sec     response tokens per second and engine device
    perf/effective_tokens_per_gpu_per_sec  the same, trained tokens only
    perf/longest_sample_tokens_per_sec     length of the longest response per second
    perf/non_generation_time/mean   seconds a sample spent in tools
    """
    everyone = [part for group in groups for part in segments(group)]
    good = [part for group in groups for part in usable(group)]
    lengths = [part.response_length for part in good]
    rewards = [part.get_reward_value(args) for part in good]
    devices = max(1, args.num_engines * args.rollout_num_gpus_per_engine)
    rate = 1.0 / max(seconds, 1e-9)
    return {
        **_spread("rollout/response_len", lengths),
        "rollout/total_tokens": float(sum(lengths)),
        "rollout/truncated_ratio": _share(part.status is Sample.Status.TRUNCATED for part in good),
        "rollout/raw_reward": statistics.fmean(rewards),
        "rollout/failed_samples": float(len(everyone) - len(good)),
        **_zero_std(args, groups),
        **_staleness(good, version),
        **_kept(good),
        "perf/tokens_per_gpu_per_sec": sum(lengths) * rate / devices,
        "perf/effective_tokens_per_gpu_per_sec": sum(part.effective_response_length for part in good) * rate / devices,
        "perf/longest_sample_tokens_per_sec": max(lengths) * rate,
        "perf/non_generation_time/mean": statistics.fmean(part.non_generation_time for part in good),
    }


def _kept(samples: Sequence[Sample]) -> dict[str, float]:
    """How many tokens sampling chose from; nothing when that was not asked for."""
    offsets = [part.rollout_top_p_token_offsets for part in samples if part.rollout_top_p_token_offsets is not None]
    counts = [after - before for one in offsets for before, after in itertools.pairwise(one) if after > before]
    return {"rollout/top_p_kept_vocab_per_token": statistics.fmean(counts)} if counts else {}


def eval_metrics(name: str, rewards: Sequence[float], samples: Sequence[Sample], num_failed: int) -> dict[str, float]:
    """Metrics of one held-out set; `rewards` are those of `samples`.

    eval/{name}                     mean reward
    eval/{name}-ci95                half the width of its 95 % confidence interval, 1.96 standard errors; with two prompts or more
    eval/{name}-pass@{k}            k = 1, 2, 4, ... up to the fewest answers of a prompt, where all have several; correct is a reward of 1
    eval/{name}-truncated_ratio, eval/{name}-response_len/{mean,median,max,min}
    eval/{name}-failed              samples that could not be had; they are in none of the others
    """
    by_prompt: dict[Any, list[float]] = defaultdict(list)
    for reward, sample in zip(rewards, samples, strict=True):
        by_prompt[sample.group_index].append(reward)
    groups = list(by_prompt.values())
    found = {
        f"eval/{name}": statistics.fmean(rewards),
        f"eval/{name}-truncated_ratio": _share(sample.status is Sample.Status.TRUNCATED for sample in samples),
        f"eval/{name}-failed": float(num_failed),
        **_spread(f"eval/{name}-response_len", [sample.response_length for sample in samples]),
    }
    if len(groups) > 1:
        found[f"eval/{name}-ci95"] = 1.96 * clustered_standard_error(groups)
    if min(map(len, groups)) > 1:
        correct = [[reward == 1.0 for reward in group] for group in groups]
        found |= {f"eval/{name}-pass@{k}": rate for k, rate in pass_rates(correct).items()}
    return found


def clustered_standard_error(groups: Sequence[Sequence[float]]) -> float:
    """Standard error of the mean over all values, where those of one group are not independent (answers to one prompt).

    sqrt(G / (G - 1) * sum_g (sum_i (x_gi - mean))^2) / N over G > 1 groups with N values in all: Miller 2024 (arXiv:2411.00640,
    section 2.2), with the usual small-sample factor.
    """
    count = sum(map(len, groups))
    mean = math.fsum(value for group in groups for value in group) / count
    squares = math.fsum(math.fsum(value - mean for value in group) ** 2 for group in groups)
    return math.sqrt(len(groups) / (len(groups) - 1) * squares) / count


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}/mean": statistics.fmean(values),
        f"{name}/median": float(statistics.median(values)),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }


def _share(flags: Any) -> float:
    return statistics.fmean(map(float, flags))


def _zero_std(args: Any, groups: Sequence[Group]) -> dict[str, float]:
    same: Counter[str] = Counter()
    for group in groups:
        rewards = [part.get_reward_value(args) for part in usable(group)]
        if len(rewards) > 1 and max(rewards) - min(rewards) < 1e-9:
            same[f"rollout/zero_std/count_{round(rewards[0], 1):g}"] += 1
    return {name: float(count) for name, count in same.items()}


def _staleness(samples: Sequence[Sample], trained: int | None) -> dict[str, float]:
    """Versions that are numbers only: before the first sync the engine says "default"."""
    seen = [versions for sample in samples if (versions := {int(v) for v in sample.weight_versions if v.isdigit()})]
    if not seen:
        return {}
    newest = max(max(versions) for versions in seen) if trained is None else trained
    behind = [newest - min(versions) for versions in seen]
    return {
        "rollout/staleness/mean": statistics.fmean(behind),
        "rollout/staleness/max": float(max(behind)),
        "rollout/mixed_versions": _share(len(versions) > 1 for versions in seen),
    }
