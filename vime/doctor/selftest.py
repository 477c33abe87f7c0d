"""The self-test: the parts of `vime.doctor.parts` side by side, each with a deadline, and what their failures mean."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.doctor.findings import Finding, State, ok, wrong
from vime.doctor.packages import last_error

__all__ = ["PART", "PLAN", "Planned", "SelfTest", "agreement", "skip_hopeless"]

PART = "self-test"
TOLERANCE = 1e-4  # of log-probs, in float32, between engine and trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One part: the packages (names of the matrix) that it cannot do without, its deadline, and where to look when it fails."""

    part: str
    needs: frozenset[str]
    seconds: float
    cure: str


def _planned(part: str, needs: str, seconds: float, cure: str) -> Planned:
    return Planned(part=part, needs=frozenset(needs.split()), seconds=seconds, cure=cure)


PLAN = (  # the longest first
    _planned("engine", "torch vLLM vllm-router transformers numpy safetensors tokenizers", 360.0, "read {folder}/engine.log"),
    _planned("trainer", "torch megatron-core transformers numpy safetensors tokenizers", 240.0, "read {folder}/trainer.err"),
    _planned("ray", "ray psutil", 120.0, "read {folder}/ray.err; a firewall or a full /tmp stops Ray, too"),
    _planned("gloo", "torch numpy", 120.0, "ip link set lo up; export GLOO_SOCKET_IFNAME=lo"),
    _planned("shm", "", 60.0, "mount -o remount,size=8G /dev/shm"),
)
MODEL = _planned("model", "numpy safetensors tokenizers", 60.0, "make setup")
WITHOUT_ENGINE = tuple(each for each in PLAN if each.part != "engine")
_QUIET = {
    "CUDA_VISIBLE_DEVICES": "",  # the trainer and the engines of this version compute on the CPU
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "RAY_ADDRESS": "",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass
class SelfTest:
    """Runs parts as processes, and checks beside them; `close` ends what still runs."""

    folder: Path  # of logs and results
    module: str = "vime.doctor.parts"
    _processes: set[subprocess.Popen[str]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def run(self, planned: Planned) -> list[Finding]:
        """One part; the findings of its steps, the last of them wrong when it failed."""
        log = self.folder / f"{planned.part}.err"
        command = [sys.executable, "-W", "ignore", "-m", self.module, planned.part, str(self.folder)]
        with log.open("w") as err, self._lock:
            if self._closed:
                return []
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=err, text=True, env=_environment(), start_new_session=True, stdin=subprocess.DEVNULL
            )
            self._processes.add(process)
        late = False
        try:
            out, _ = process.communicate(timeout=planned.seconds)
        except subprocess.TimeoutExpired:
            late = True
            _end(process)
            out, _ = process.communicate()
        _end(process)  # what it may have left in its session
        with self._lock:
            self._processes.discard(process)
        return self._findings(planned, out, process.returncode, late, log)

    def _findings(self, planned: Planned, out: str, code: int, late: bool, log: Path) -> list[Finding]:
        steps = [json.loads(line) for line in out.splitlines() if line.startswith('{"name"')]
        found = [ok(PART, step["name"], step["found"], seconds=step["seconds"]) for step in steps]
        if late or code != 0:
            failed = [json.loads(line)["failed"] for line in out.splitlines() if line.startswith('{"failed"')]
            why = f"not done after {planned.seconds:g} s" if late else _short(failed) or last_error(log.read_text(errors="replace"), code)
            after = f" (after '{steps[-1]['name']}')" if steps else ""
            cure = planned.cure.format(folder=self.folder)
            found.append(wrong(PART, planned.part, f"{why}{after}", expected=f"that it works within {planned.seconds:g} s", cure=cure))
        return found

    def side_by_side(self, parts: Iterable[Planned], checks: Iterable[Callable[[], Any]]) -> tuple[list[list[Finding]], list[Any]]:
        """Run parts and checks, as many at a time as there are cores (two at least); the results in their orders."""
        workers = max(2, min(8, len(os.sched_getaffinity(0))))
        with ThreadPoolExecutor(workers) as pool:
            listed = list(parts)
            tested: list[Future[list[Finding]]] = [pool.submit(self.run, part) for part in listed[:1]]
            checked = [pool.submit(check) for check in checks]
            tested += [pool.submit(self.run, part) for part in listed[1:]]
            try:
                return [future.result() for future in tested], [future.result() for future in checked]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.close()
                raise

    def close(self) -> None:
        """End the processes of parts that still run."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                _end(process)


def agreement(folder: Path) -> Finding | None:
    """Whether engine and trainer give the same log-probs; None when one of them gave none."""
    files = [folder / "trainer.json", folder / "engine.json"]
    if not all(file.exists() for file in files):
        return None
    ours, theirs = (json.loads(file.read_text()) for file in files)
    apart = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    found, expected = f"log-probs of {len(ours)} tokens differ by {max(apart):.1e} at most", f"at most {TOLERANCE:g}"
    if not all(each <= TOLERANCE for each in apart):  # a NaN is not, either
        cure = "make setup: one of vLLM, megatron-core and torch is not the tested version"
        return wrong(PART, "engine and trainer", found, expected=expected, cure=cure)
    return ok(PART, "engine and trainer", found, expected=expected)


def skip_hopeless(results: Mapping[Planned, list[Finding]], broken: Iterable[str]) -> list[Finding]:
    """All findings; a failure of a part whose package is broken is told as skipped: the package's finding has the cure."""
    lost = set(broken)
    out = []
    for planned, findings in results.items():
        missing = sorted(planned.needs & lost)
        for finding in findings:
            if missing and finding.state is State.WRONG:
                finding = Finding(part=PART, name=planned.part, state=State.SKIPPED, found=f"needs {', '.join(missing)} (see above)")
            out.append(finding)
    return out


def _short(failed: list[str]) -> str:
    """The beginning of the reason that a part gave: of an engine, the first error of its log is in there."""
    return " ".join(" ".join(failed[-1].splitlines()[:3]).split())[:600] if failed else ""


def _environment() -> dict[str, str]:
    env = dict(os.environ) | _QUIET
    del env["RAY_ADDRESS"]  # the self-test has a cluster of its own
    return env


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a part's process group; engines and Ray notice that it is gone, and end."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
