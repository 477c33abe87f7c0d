"""Samples per second of TRL's GRPOTrainer on CPU, on the quickstart's step.

    .venv/bin/python -m benchmarks.trl_step            # measure with the settings of results/trl_tuning.json, print JSON
    .venv/bin/python -m benchmarks.trl_step --tune     # try TRL's settings one by one, keep what is fastest, write that file

TRL is installed into its own environment (trl_env.py) and measured in its own process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine, wait_quiet
from benchmarks.trl_env import make_environment
from benchmarks.workload import RESULTS, ROOT, Assets, Workload, add_arguments, from_arguments, limited_threads, spread, write_result

__all__ = ["Settings", "run_trl", "tuned_settings"]

TUNING = RESULTS / "trl_tuning.json"
SECONDS_PER_RUN = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What TRL leaves to its user, and can make it faster on a CPU. None of it changes what is computed."""

    per_device: int  # samples of a forward and backward pass; smaller ones are accumulated
    threads: int = 2
    optim: str = "adamw_torch_fused"
    attention: str = "sdpa"
    cache: str | None = None  # key-value cache of transformers' generate; None = dynamic
    torch_compile: bool = False
    continuous_batching: bool = False  # transformers' own serving loop in place of generate


def run_trl(workload: Workload, assets: Assets, settings: Settings) -> dict[str, Any]:
    """One run in its own process: samples/s and seconds over the measured steps, phases, lengths, memory.

    Raises RuntimeError with the last lines of its output when it fails, TimeoutExpired after SECONDS_PER_RUN.
    """
    python = make_environment()
    with tempfile.TemporaryDirectory(prefix="vime-bench-trl-") as folder:
        out = Path(folder) / "out.json"
        job = {"workload": workload.as_dict(), "settings": asdict(settings), "out": str(out)}
        job |= {"model": str(assets.model.resolve()), "prompts": str(assets.prompts.resolve())}
        done = subprocess.run(
            [str(python), "-m", "benchmarks.trl_worker", json.dumps(job)],
            cwd=ROOT,
            env=limited_threads(settings.threads),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=SECONDS_PER_RUN,
        )
        if done.returncode != 0:
            tail = "\n".join(done.stdout.splitlines()[-15:])
            raise RuntimeError(f"TRL's process ended with exit code {done.returncode}:\n{tail}")
        return _summary(workload, settings, json.loads(out.read_text(encoding="utf-8")))


def _summary(workload: Workload, settings: Settings, found: dict[str, Any]) -> dict[str, Any]:
    """The worker's figures without the warm-up steps."""
    seconds = found["seconds"][workload.warmup :]
    phases = found["phases"][workload.warmup :]
    tokens = found["tokens"][workload.warmup :]
    if len(seconds) != workload.measured or any(count != workload.samples for *_, count in tokens):
        raise RuntimeError(
            f"TRL ran {len(seconds)} steps of {[count for *_, count in tokens]} samples, not {workload.measured} of {workload.samples}."
        )
    return {
        "samples_per_second": spread([workload.samples / value for value in seconds]),
        "step_seconds": spread(seconds),
        "phase_seconds": {name: spread([step[name] for step in phases]) for name in phases[0]},
        "prompt_tokens_mean": round(sum(step[0] for step in tokens) / (workload.samples * len(tokens)), 2),
        "response_tokens_mean": round(sum(step[1] for step in tokens) / (workload.samples * len(tokens)), 2),
        "rewards": [round(value, 3) for value in found["rewards"]],
        "peak_rss_gib": round(found["peak_rss_bytes"] / 2**30, 2),
        "settings": asdict(settings),
        "versions": found["versions"],
        "licence": found["licence"],
    }


def tuned_settings(workload: Workload) -> Settings:
    """The settings that --tune found fastest, or the default when it has not run."""
    default = Settings(per_device=workload.minibatch, threads=workload.threads)
    if not TUNING.exists():
        return default
    best = json.loads(TUNING.read_text(encoding="utf-8"))["best"]
    fits = workload.minibatch % best["per_device"] == 0
    return replace(Settings(**best), threads=workload.threads, per_device=best["per_device"] if fits else workload.minibatch)


def tune(workload: Workload, assets: Assets) -> dict[str, Any]:
    """Try one change at a time from the best so far, and keep it when its fastest step is faster.

    The fastest step, not the median: it is what other processes on the machine disturb least.
    """
    best = Settings(per_device=workload.minibatch, threads=workload.threads)
    changes: list[dict[str, Any]] = [
        {},
        {"optim": "adamw_torch"},
        {"per_device": workload.minibatch // 2},
        {"per_device": workload.minibatch // 4},
        {"attention": "eager"},
        {"cache": "static"},
        {"continuous_batching": True},
        {"threads": 1},
    ]
    tried = []
    fastest = 0.0
    for change in changes:
        settings = replace(best, **change)
        wait_quiet(20.0)
        try:
            rate = run_trl(workload, assets, settings)["samples_per_second"]
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            tried.append({"change": change, "failed": str(error).splitlines()[-1]})
        else:
            tried.append({"change": change, "samples_per_second": rate})
            if rate["max"] > fastest:
                best, fastest = settings, rate["max"]
        print(tried[-1], file=sys.stderr, flush=True)
    return {"machine": describe_machine(), "workload": workload.as_dict(), "tried": tried, "best": asdict(best)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Samples per second of TRL's GRPOTrainer on CPU.")
    parser.add_argument("--tune", action="store_true", help="find TRL's fastest settings and write results/trl_tuning.json")
    add_arguments(parser)
    arguments = parser.parse_args()
    workload, assets = from_arguments(arguments)
    if arguments.tune:
        found = tune(workload, assets)
        print(json.dumps(found, indent=2))
        print(f"written: {write_result('trl_tuning', found).relative_to(ROOT)}", file=sys.stderr)
        return
    machine = describe_machine() | {"busy_cores": wait_quiet(60.0)}
    result = run_trl(workload, assets, tuned_settings(workload))
    print(json.dumps({"machine": machine, "workload": workload.as_dict(), "trl": result}, indent=2))


if __name__ == "__main__":
    main()
