"""Memory of all processes of the run together, sampled in a thread of the driver."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import psutil

__all__ = ["MemoryMonitor"]


class MemoryMonitor:
    """Peak resident memory of this process and all its descendants.

    Shared pages are counted once: the sum of PSS (proportional set size, from /proc/PID/smaps_rollup). Processes of a Ray
    cluster that the driver only joined are not its descendants and are not counted.
    """

    def __init__(self, interval: float = 5.0) -> None:
        self.peak_bytes = 0
        self.peak_processes = 0
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-monitor", daemon=True)

    def start(self) -> None:
        """Begin sampling."""
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30.0)

    def sample(self) -> int:
        """Bytes resident now, all processes together."""
        me = psutil.Process()
        processes = [me]
        with contextlib.suppress(psutil.NoSuchProcess):
            processes += me.children(recursive=True)
        total = sum(_pss(process.pid) for process in processes)
        if total > self.peak_bytes:
            self.peak_bytes, self.peak_processes = total, len(processes)
        return total

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.sample()
        self.sample()


def _pss(pid: int) -> int:
    """Proportional set size of one process in bytes; 0 when it is gone or not ours to read."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
