"""How much of a step is useful tokens, and how long ranks wait for one another, on long-tailed response lengths.

    python benchmarks/packing.py [--samples 512] [--dp 8] [--budget 8192] [--median 600] [--sigma 1.0] [--longest 8192]

Ways to split the same samples, all measured by the same yardsticks:

    padded         arrival order, rows padded to the longest of each micro-batch (no packing)
    first fit      arrival order dealt round robin to the ranks, packed first-fit into the budget
    slime          its published scheme: the whole step packed first-fit into the budget, the fullest packs halved until their
                   number is a multiple of the ranks, packs dealt round robin, each padded to a multiple of 128 tokens
    slime balanced the same with --balance-data: packs dealt by Karmarkar-Karp differencing over their estimated cost
    vime, count    --micro-batch-size, packed rows
    vime, budget   --use-dynamic-batch-size --max-tokens-per-gpu

Useful tokens: real tokens / token slots that are computed. Budget filled: real tokens / (micro-batches x budget). Imbalance:
cost of the slowest rank / mean cost - 1; in lockstep: the same when ranks wait for one another after every micro-batch (as with
expert parallelism), a missing one costing nothing. Costs come from the cost model of vime/packing/balance.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from vime.config.sections import AlgorithmConfig, DataConfig, RewardConfig
from vime.packing.balance import sequence_cost
from vime.packing.build import FILLER_ID, build_train_batches
from vime.utils.types import Sample

Plan = list[list[list[int]]]  # [rank][micro-batch][sample] -> its length


def lengths_of(options: argparse.Namespace) -> list[int]:
    """Log-normal response lengths, cut off at the longest, plus a prompt of 100 tokens."""
    generator = np.random.default_rng(options.seed)
    drawn = generator.lognormal(np.log(options.median), options.sigma, options.samples)
    return [100 + int(n) for n in np.clip(drawn, 1, options.longest - 100)]


def arrival_order(lengths: list[int], dp: int, micro_batch_size: int) -> Plan:
    """Round robin over ranks, a fixed number of samples in each micro-batch."""
    ranks = [lengths[rank::dp] for rank in range(dp)]
    return [[mine[at : at + micro_batch_size] for at in range(0, len(mine), micro_batch_size)] for mine in ranks]


def first_fit(lengths: list[int], dp: int, budget: int) -> Plan:
    """Round robin over ranks, each sample into the first micro-batch with room."""
    plan: Plan = []
    for rank in range(dp):
        bins: list[list[int]] = []
        for length in lengths[rank::dp]:
            place = next((members for members in bins if sum(members) + length <= budget), None)
            if place is None:
                bins.append([length])
            else:
                place.append(length)
        plan.append(bins)
    return plan


def slimes_packs(lengths: list[int], dp: int, budget: int) -> list[list[int]]:
    """First-fit packs of the whole step, halved at the fullest until their number is a multiple of `dp`."""
    packs = first_fit(lengths, 1, budget)[0]
    while len(packs) % dp:
        fullest = max((pack for pack in packs if len(pack) > 1), key=sum)
        packs.remove(fullest)
        packs += [fullest[: len(fullest) // 2], fullest[len(fullest) // 2 :]]
    return packs


def round_robin(packs: list[list[int]], dp: int) -> Plan:
    """The packs dealt in order."""
    return [packs[rank::dp] for rank in range(dp)]


def differenced(packs: list[list[int]], dp: int) -> Plan:
    """Equally many packs a rank by the largest differencing method (Karmarkar and Karp 1982): k-tuples of one pack each are
    merged, the heaviest place of one with the lightest of the other, those with the largest spread first."""
    by_cost = sorted(packs, key=lambda pack: -sum(map(sequence_cost, pack)))
    tuples = []
    for at in range(0, len(by_cost), dp):
        places = [(sum(map(sequence_cost, pack)), [pack]) for pack in by_cost[at : at + dp]]
        tuples.append(sorted(places, key=lambda place: -place[0]))
    while len(tuples) > 1:
        tuples.sort(key=lambda places: places[0][0] - places[-1][0])
        one, other = tuples.pop(), tuples.pop()
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        tuples.append(sorted(merged, key=lambda place: -place[0]))
    return [content for _, content in tuples[0]]


def ours(lengths: list[int], dp: int, data: DataConfig) -> Plan:
    """What the framework does."""
    samples = [
        Sample(index=i, group_index=i // 8, tokens=[1] * n, response_length=n - 100, reward=float(i % 2), status=Sample.Status.COMPLETED)
        for i, n in enumerate(lengths)
    ]
    batches = build_train_batches(
        samples,
        rollout_id=0,
        data=data,
        algorithm=AlgorithmConfig(),
        reward=RewardConfig(),
        dp_size=dp,
        args=SimpleNamespace(reward_key=None),
    )
    return [
        [[b.samples[i].length for i in micro if b.samples[i].sample_id != FILLER_ID] for micro in b.steps[0].micro_batches] for b in batches
    ]


def measure(name: str, make: Callable[[], Plan], budget: int, *, padded: bool = False, multiple_of: int = 1) -> dict[str, Any]:
    """One line of figures, printed and returned."""
    began = time.perf_counter()
    plan = make()
    seconds = time.perf_counter() - began
    micros = [micro for rank in plan for micro in rank]
    real = sum(map(sum, micros))
    slots = sum(len(micro) * max(micro, default=0) if padded else -(-sum(micro) // multiple_of) * multiple_of for micro in micros)
    most = max(len(rank) for rank in plan)
    costs = [
        [sum(sequence_cost(max(micro) if padded else n) for n in micro) for micro in rank] + [0.0] * (most - len(rank)) for rank in plan
    ]
    mean = sum(map(sum, costs)) / len(costs)
    slowest = max(map(sum, costs))
    lockstep = sum(map(max, zip(*costs, strict=True)))
    print(
        f"{name:14s} useful tokens {real / slots:6.1%}   budget filled {real / (most * len(plan) * budget):6.1%}   "
        f"micro-batches a rank {min(len(rank) for rank in plan)}-{most}   imbalance {slowest / mean - 1:6.1%}, "
        f"in lockstep {lockstep / mean - 1:6.1%}   "
        f"slowest rank's cost {slowest:10,.0f}   planned in {seconds * 1e3:.0f} ms"
    )
    return {
        "way": name,
        "useful_tokens": real / slots,
        "budget_filled": real / (most * len(plan) * budget),
        "micro_batches_a_rank": most,
        "imbalance": slowest / mean - 1,
        "imbalance_in_lockstep": lockstep / mean - 1,
        "slowest_rank_cost": slowest,
        "planned_in_ms": seconds * 1e3,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("samples", 512), ("dp", 8), ("budget", 8192), ("longest", 8192), ("micro-batch-size", 4), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--median", type=float, default=600.0)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--out", help="also write the figures to this JSON file")
    options = parser.parse_args()
    lengths = lengths_of(options)
    quantiles = np.percentile(lengths, [50, 90, 99, 100]).astype(int).tolist()
    print(
        f"{platform.machine()}, Python {platform.python_version()}; {options.samples} samples, {options.dp} ranks, budget {options.budget}"
    )
    print(f"lengths: median, 90 %, 99 %, longest = {quantiles}; {sum(lengths):,} tokens\n")
    dp, budget, size = options.dp, options.budget, options.micro_batch_size
    packed = DataConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=budget)
    rows = [
        measure("padded", lambda: arrival_order(lengths, dp, size), budget, padded=True),
        measure("first fit", lambda: first_fit(lengths, dp, budget), budget),
        measure("slime", lambda: round_robin(slimes_packs(lengths, dp, budget), dp), budget, multiple_of=128),
        measure("slime balanced", lambda: differenced(slimes_packs(lengths, dp, budget), dp), budget, multiple_of=128),
        measure("vime, count", lambda: ours(lengths, dp, DataConfig(micro_batch_size=size)), budget),
        measure("vime, budget", lambda: ours(lengths, dp, packed), budget),
    ]
    if options.out:
        Path(options.out).write_text(json.dumps({"options": vars(options), "length_quantiles": quantiles, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
