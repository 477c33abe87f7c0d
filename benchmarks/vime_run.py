"""One measured run of `vime train`: the quickstart's command line with the benchmark's model, prompts and number of steps.

Seconds per phase come from metrics.jsonl. The wall time of a step is the time between two of the status lines as they come out
of the process, so that what no phase counts is seen as well.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.workload import ROOT, Assets, Workload, spread
from examples.quickstart import recipe
from vime.observability.metrics import read_metrics

__all__ = ["run_vime", "vime_flags"]

SECONDS_PER_RUN = 900.0
PHASES = ("rollout", "train", "sync")
# The quickstart's flags that are none of a step's: evaluation, saving, a learning-rate warm-up longer than a short measurement.
LEFT_OUT = (
    "--eval-prompt-data",
    "--eval-interval",
    "--eval-temperature",
    "--save",
    "--save-interval",
    "--save-hf",
    "--use-tensorboard",
    "--lr-warmup-iters",
)

READY = re.compile(r"^ready after ")
SYNCED = re.compile(r"^weights sent: ")
STEP = re.compile(r"^step (\d+)/\d+ ")
MEMORY = re.compile(r"peak memory ([0-9.]+) GiB resident \((\d+) processes\)")


def vime_flags(workload: Workload, assets: Assets, log_dir: Path, extra: list[str]) -> list[str]:
    """The quickstart's GRPO command line, without evaluation and saving, on the workload; `extra` flags come last."""
    flags = {words[0]: words[1:] for words in _by_flag(recipe.grpo_flags(log_dir))}
    for name in LEFT_OUT:
        flags.pop(name, None)
    context = max(int(flags["--rollout-max-context-len"][0]), 40 + workload.max_new_tokens)
    flags |= {
        "--hf-checkpoint": [str(assets.model.resolve())],
        "--prompt-data": [str(assets.prompts.resolve())],
        "--rollout-batch-size": [str(workload.prompts)],
        "--n-samples-per-prompt": [str(workload.group)],
        "--global-batch-size": [str(workload.minibatch)],
        "--rollout-max-response-len": [str(workload.max_new_tokens)],
        "--rollout-max-context-len": [str(context)],
        "--num-rollout": [str(workload.steps)],
        "--lr": [str(workload.learning_rate)],
        "--adam-beta2": [str(workload.adam_beta2)],
        "--weight-decay": [str(workload.weight_decay)],
        "--clip-grad": [str(workload.clip_grad)],
        "--seed": [str(workload.seed)],
        "--rollout-seed": [str(workload.seed)],
        "--train-threads": [str(workload.threads)],
        "--log-dir": [str(log_dir)],
    }
    flags |= {words[0]: words[1:] for words in _by_flag(extra)}
    return [token for name, values in flags.items() for token in (name, *values)]


def _by_flag(tokens: list[str]) -> list[list[str]]:
    """Tokens as [flag, value, ...] lists."""
    words: list[list[str]] = []
    for token in tokens:
        if token.startswith("--"):
            words.append([token])
        else:
            words[-1].append(token)
    return words


def run_vime(workload: Workload, assets: Assets, extra: list[str]) -> dict[str, Any]:
    """One run: samples/s and seconds over the measured steps, phases, their shares, start-up, lengths, memory.

    Raises RuntimeError with the last lines of the run when it fails or takes longer than SECONDS_PER_RUN.
    """
    with tempfile.TemporaryDirectory(prefix="vime-bench-") as folder:
        flags = vime_flags(workload, assets, Path(folder), extra)
        begun = time.perf_counter()
        lines = _run([sys.executable, "train.py", *flags])
        metrics = read_metrics(Path(folder) / "metrics.jsonl")
        return _summary(workload, metrics, lines, begun) | {"flags": shlex.join(_public(flags))}


def _public(flags: list[str]) -> list[str]:
    """The flags without this machine's folders."""
    return [Path(token).name if token.startswith("/") else token for token in flags]


def _run(command: list[str]) -> list[tuple[float, str]]:
    """Run to the end; its output as (perf_counter at arrival, line)."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert process.stdout is not None
    lines: list[tuple[float, str]] = []
    with _ended(process) as late:
        for line in process.stdout:
            lines.append((time.perf_counter(), line.rstrip("\n")))
        code = process.wait(timeout=60)
    tail = "\n".join(line for _, line in lines[-25:])
    if late.is_set():
        raise RuntimeError(f"vime train took more than {SECONDS_PER_RUN:.0f} s and was ended; its last lines:\n{tail}")
    if code != 0:
        raise RuntimeError(f"vime train ended with exit code {code}; its last lines:\n{tail}")
    return lines


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[threading.Event]:
    """Whatever happens, the run is asked to end, then killed with its group; the event says that it was its deadline."""
    late = threading.Event()

    def end() -> None:
        late.set()
        process.send_signal(signal.SIGINT)

    watchdog = threading.Timer(SECONDS_PER_RUN, end)
    watchdog.start()
    try:
        yield late
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=60)


def _summary(
    workload: Workload, metrics: dict[str, list[tuple[int, float]]], lines: list[tuple[float, str]], begun: float
) -> dict[str, Any]:
    """The run's figures without its warm-up steps."""
    ready = _time_of(READY, lines)
    walls = _step_walls(workload, lines)
    phases = {name: [value for step, value in metrics[f"perf/{name}_time"] if step >= workload.warmup] for name in PHASES}
    if any(len(values) != workload.measured for values in phases.values()):
        raise RuntimeError(
            f"metrics.jsonl has { ({name: len(values) for name, values in phases.items()}) } steps, not {workload.measured}."
        )
    counted = [sum(values) for values in zip(*phases.values(), strict=True)]
    parts = {name: spread([value for step, value in pairs if step >= workload.warmup]) for name, pairs in sorted(metrics.items())}
    memory = next((found for _, line in reversed(lines) if (found := MEMORY.search(line))), None)
    return {
        "samples_per_second": spread([workload.samples / wall for wall in walls]),
        "step_seconds": spread(walls),
        "phase_seconds": {name: spread(values) for name, values in phases.items()},
        "share_outside_phases": spread([1 - inside / wall for inside, wall in zip(counted, walls, strict=True)]),
        "start_up_seconds": round(ready - begun, 1),
        "first_weights_seconds": round(_time_of(SYNCED, lines) - begun, 1),
        "response_tokens_mean": round(statistics.fmean(value for _, value in metrics["rollout/response_len/mean"][workload.warmup :]), 2),
        "rewards": [round(value, 3) for _, value in metrics["rollout/raw_reward"]],
        "peak_memory_gib": float(memory[1]) if memory else None,
        "processes": int(memory[2]) if memory else None,
        "metrics": {name: values for name, values in parts.items() if name.startswith(("perf/", "train/train_rollout"))},
    }


def _time_of(pattern: re.Pattern[str], lines: list[tuple[float, str]]) -> float:
    """When the first line that matches came."""
    for arrived, line in lines:
        if pattern.search(line):
            return arrived
    raise RuntimeError(
        f"the run never printed a line like {pattern.pattern!r}; its last lines:\n" + "\n".join(line for _, line in lines[-25:])
    )


def _step_walls(workload: Workload, lines: list[tuple[float, str]]) -> list[float]:
    """Wall seconds of each measured step: from the end of the step before to its own."""
    ends = {int(found[1]): arrived for arrived, line in lines if (found := STEP.match(line))}
    wanted = range(workload.warmup + 1, workload.steps + 1)
    missing = [step for step in (workload.warmup, *wanted) if step not in ends]
    if missing:
        raise RuntimeError(f"the run never printed the end of steps {missing}.")
    return [ends[step] - ends[step - 1] for step in wanted]
