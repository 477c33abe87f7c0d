"""Starting whole runs from their command line, and looking at what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[3]
MARK = "VIME_TEST_RUN"  # in the environment of a run and so of every process that it starts


class Run:
    """One `python train.py ...` process with everything below it."""

    def __init__(self, flags: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.mark = uuid.uuid4().hex
        self.log = log
        self.segments_before = set(os.listdir("/dev/shm"))
        self.ports_before = _listening_ports()
        env = env or {}
        path = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(Path(__file__).parent)]))  # our hooks, and the test's
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *flags],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, MARK: self.mark, **env, "PYTHONPATH": path},
                cwd=ROOT,
            )

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = 280.0) -> int:
        """The exit code; a run that does not end is killed and fails the test with its output."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the run did not end within {seconds} s:\n{self.output[-3000:]}") from None

    def wait_for(self, text: str, seconds: float = 240.0) -> None:
        """Wait until the run has printed `text`."""
        end = time.monotonic() + seconds
        while text not in self.output:
            assert self.process.poll() is None, f"the run ended before '{text}':\n{self.output[-3000:]}"
            assert time.monotonic() < end, f"no '{text}' within {seconds} s:\n{self.output[-3000:]}"
            time.sleep(0.05)  # looking at a file of another process

    def kill(self) -> None:
        """kill -9 of the driver alone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def processes(self) -> dict[int, str]:
        """Every living process of the run: pid -> command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:400]
            except OSError:
                continue
        return found

    def others(self) -> set[int]:
        """Living processes that are plainly not of the run: their environment can be read, and has not its mark."""
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if MARK.encode() + b"=" + self.mark.encode() not in (entry / "environ").read_bytes().split(b"\0"):
                        found.add(int(entry.name))
        return found

    def assert_nothing_left(self, seconds: float = 30.0, *, ports: bool = True) -> None:
        """No process, shared-memory segment or listening port of the run is left, at the latest after `seconds`.

        Without `ports` where a cluster that is not the run's opens ports of its own meanwhile.
        """
        end = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.2)  # other processes are ending
        assert not left, f"processes left: {left}"
        # a stranger that began between two looks at the machine is known at the next
        while left_segments := set(os.listdir("/dev/shm")) - self.segments_before - _segments_in_use():
            assert time.monotonic() < end, f"left in /dev/shm: {left_segments}"
            time.sleep(0.2)
        while left_ports := (_listening_ports(self.others()) - self.ports_before if ports else set()):
            assert time.monotonic() < end, f"ports that somebody still listens on: {left_ports}"
            time.sleep(0.2)


def _listening_ports(without: set[int] | frozenset[int] = frozenset()) -> set[int]:
    """TCP ports of this machine on which a process listens that is none of `without`."""
    open_ports = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return {c.laddr.port for c in open_ports if c.pid not in without}


def _segments_in_use() -> set[str]:
    """Shared-memory segments that some living process (of another run, say) has mapped, told by inode."""
    inodes = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                inodes |= {line.split()[4] for line in (entry / "maps").read_text().splitlines() if "/dev/shm/" in line}
    used = set()
    for name in os.listdir("/dev/shm"):
        with contextlib.suppress(OSError):
            if str(os.stat(f"/dev/shm/{name}").st_ino) in inodes:
                used.add(name)
    return used


def metrics(folder: Path, *, timing: bool = False) -> list[dict[str, object]]:
    """metrics.jsonl, by default without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if timing:
        return lines
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]
