"""A small process between us and a server: when we are gone, however that happened, it ends the server's whole process tree.

    python -S -I supervisor.py PARENT_PID CONTROL_FD GRACE_SECONDS SCRATCH_DIR -- COMMAND...

It watches us through a pidfd, and holds one end of a pipe whose other end we close to stop it. At either, at SIGTERM, and
when the command itself ends, every descendant is ended: SIGTERM, GRACE_SECONDS of patience, then SIGKILL until none is left. It is the
descendants' subreaper, so that a server's orphans stay its children. Shared-memory segments that the tree had mapped are
removed (a killed server cannot do so itself), and so is SCRATCH_DIR. Standard library only: it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SHM_DIR = "/dev/shm/"
OWN_SEGMENTS = "vime-weights"  # the trainer's, which looks after them itself
SEGMENT_INTERVAL = 2.0  # seconds between looks at the shared memory that the tree holds
KILL_PATIENCE = 10.0  # seconds until processes that were sent SIGKILL must be gone


def children_of(pid: int) -> list[int]:
    """Direct children of all threads of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as lines:
                found += [int(word) for word in lines.read().split()]
    return found


def descendants(root: int) -> list[int]:
    """All processes below `root`, nearest first."""
    found: list[int] = []
    queue = children_of(root)
    while queue:
        pid = queue.pop(0)
        found.append(pid)
        queue += children_of(pid)
    return found


def mapped_segments(pids: list[int]) -> set[str]:
    """Paths under /dev/shm that these processes have mapped, but for the trainer's weight segments.

    Told by inode: a semaphore is mapped under a temporary name that it no longer has.
    """
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as lines:
            inodes |= {int(line.split()[4]) for line in lines if SHM_DIR in line}
    paths: set[str] = set()
    with contextlib.suppress(OSError):
        paths = {entry.path for entry in os.scandir(SHM_DIR) if entry.inode() in inodes}
    return {path for path in paths if not path.startswith(SHM_DIR + OWN_SEGMENTS)}


def reap() -> dict[int, int]:
    """Collect children that have ended, orphans included: exit status by pid, negative when a signal ended it."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def wait_gone(seconds: float) -> bool:
    """Reap until no descendant is left, for at most `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        reap()
        if not descendants(os.getpid()):
            return True
        if time.monotonic() > deadline:
            return False
        select.select([], [], [], 0.02)


def end_tree(root: int, grace: float, segments: set[str]) -> None:
    """End every descendant of ours, and remove the shared memory they leave behind. `root` is the server's first process.

    `segments`: what they were seen to hold before; a process that is gone tells no more.
    """
    segments |= mapped_segments(descendants(os.getpid()))
    with contextlib.suppress(ProcessLookupError):
        os.kill(root, signal.SIGTERM)
    if not wait_gone(grace):
        deadline = time.monotonic() + KILL_PATIENCE
        while time.monotonic() < deadline:
            left = descendants(os.getpid())
            segments |= mapped_segments(left)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if wait_gone(0.2):
                break
    for path in segments:
        with contextlib.suppress(OSError):
            os.unlink(path)


def main(argv: list[str]) -> int:
    """Run the command under watch; the exit status is the command's (128 + signal when a signal ended it)."""
    parent, control, grace, scratch, command = int(argv[0]), int(argv[1]), float(argv[2]), argv[3], argv[5:]
    if os.getppid() != parent:
        return 0  # our parent died before we looked
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)

    def die_with_supervisor() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    child = subprocess.Popen(command, preexec_fn=die_with_supervisor).pid
    watched = [control, wake_read, os.pidfd_open(parent)]
    status: int | None = None
    segments: set[str] = set()
    while status is None:
        readable, _, _ = select.select(watched, [], [], SEGMENT_INTERVAL)
        segments |= mapped_segments(descendants(os.getpid()))
        signals = os.read(wake_read, 4096) if wake_read in readable else b""
        if any(fd != wake_read for fd in readable) or any(number != signal.SIGCHLD for number in signals):
            break
        status = reap().get(child)
    end_tree(child, grace if status is None else 0.0, segments)
    shutil.rmtree(scratch, ignore_errors=True)
    if status is None:
        return 0
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
