"""A quickstart step: seconds per phase, samples per second, and the ratio to TRL's GRPOTrainer on the same step, in one run.

    .venv/bin/python -m benchmarks.step                    # TRL, vime, TRL, vime; prints JSON, writes results/step.json
    .venv/bin/python -m benchmarks.step --only-vime        # vime alone
    .venv/bin/python -m benchmarks.step --name long --max-new-tokens 64 --model ... -- --use-rollout-logprobs

Flags after `--` go to `vime train` as they are. The sides take turns so that a change of the machine's speed meets both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.machine import busy_cores, describe_machine, wait_quiet
from benchmarks.trl_step import run_trl, tuned_settings
from benchmarks.vime_run import run_vime
from benchmarks.workload import ROOT, Assets, Workload, add_arguments, from_arguments, write_result

__all__ = ["measure"]


def measure(workload: Workload, assets: Assets, rounds: int, extra: list[str], *, with_trl: bool, patience: float) -> dict[str, Any]:
    """`rounds` runs of each side, in turns, and the ratio of their samples per second, round by round and overall.

    Before each run it waits up to `patience` seconds for a quiet machine.
    """
    machine = describe_machine()
    runs: dict[str, list[dict[str, Any]]] = {"trl": [], "vime": []}
    sides: dict[str, Callable[[], dict[str, Any]]] = {
        "trl": lambda: run_trl(workload, assets, tuned_settings(workload)),
        "vime": lambda: run_vime(workload, assets, extra),
    }
    if not with_trl:
        del sides["trl"]
    for number in range(1, rounds + 1):
        for side, run in sides.items():
            before = wait_quiet(patience)
            runs[side].append(run() | {"busy_cores_before": before, "busy_cores_after": busy_cores()})
            _say(number, side, runs[side][-1])
    result: dict[str, Any] = {"machine": machine, "workload": workload.as_dict()}
    if with_trl:
        result["ratio"] = _ratio(runs)
    return result | {side: found for side, found in runs.items() if found}


def _ratio(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """samples/s of vime over TRL's: medians of each round, and best against best (what other processes disturb least)."""
    pairs = list(zip(runs["vime"], runs["trl"], strict=True))
    rounds = [vime["samples_per_second"]["median"] / trl["samples_per_second"]["median"] for vime, trl in pairs]
    best = {side: max(run["samples_per_second"]["max"] for run in found) for side, found in runs.items()}
    return {
        "by_round": [round(value, 3) for value in rounds],
        "mean": round(sum(rounds) / len(rounds), 3),
        "best_step_to_best_step": round(best["vime"] / best["trl"], 3),
        "goal": 2.0,
    }


def _say(number: int, side: str, run: dict[str, Any]) -> None:
    rate = run["samples_per_second"]
    phases = "  ".join(f"{name} {values['median']:.3f}s" for name, values in run["phase_seconds"].items())
    text = f"round {number}  {side:<4}  {rate['median']:.0f} samples/s ({rate['min']:.0f} to {rate['max']:.0f})  {phases}"
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Command line."""
    own, extra = sys.argv[1:], []
    if "--" in own:
        cut = own.index("--")
        own, extra = own[:cut], own[cut + 1 :]
    parser = argparse.ArgumentParser(description="A quickstart step of vime, against TRL's.")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side (default: %(default)s)")
    parser.add_argument("--only-vime", action="store_true", help="leave TRL out")
    parser.add_argument(
        "--wait-quiet", type=float, default=60.0, help="seconds to wait for a quiet machine before a run (default: %(default)s)"
    )
    parser.add_argument("--name", default="step", help="write results/NAME.json (default: %(default)s)")
    add_arguments(parser)
    arguments = parser.parse_args(own)
    workload, assets = from_arguments(arguments)
    result = measure(workload, assets, arguments.rounds, extra, with_trl=not arguments.only_vime, patience=arguments.wait_quiet)
    print(json.dumps(result, indent=2))
    print(f"written: {write_result(arguments.name, result).relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
