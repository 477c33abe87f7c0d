"""A small process that outlives the driver by a moment and ends what the driver could not.

    python -S -I reaper.py DRIVER_PID MARK FOLDER

When the driver is gone, however that happened, the processes of its run (MARK, "NAME=value", is in their environment) get
GRACE seconds to end by themselves: engines have supervisors that clean up, workers notice that their raylet is gone. What is
left then is killed (Ray's agents sometimes outlive a raylet that was killed), and FOLDER, Ray's, is removed. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time

GRACE = 12.0  # seconds; an engine's own supervisor takes up to 5 s of patience
POLL = 0.2


def processes_with(mark: bytes) -> list[int]:
    """Living processes other than this one that have `mark` in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def main(argv: list[str]) -> int:
    """See the module."""
    driver, mark, folder = int(argv[0]), argv[1].encode(), argv[2]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(driver)], [], [])
    end = time.monotonic() + GRACE
    while (left := processes_with(mark)) and time.monotonic() < end:
        select.select([], [], [], POLL)  # they are no children of ours: the kernel tells us nothing
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
