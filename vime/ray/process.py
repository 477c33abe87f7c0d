"""What every actor process of ours does first: its output goes to a log of its own, and it can be watched."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from pathlib import Path
from typing import Any

import ray

__all__ = ["WatchedActor", "redirect_output", "watched_actor"]


class WatchedActor:
    """Base of our actors. `watch` returns only when the run ends; Ray fails the call when the process dies."""

    def __init__(self, log: str) -> None:
        redirect_output(Path(log))
        self._stopped = threading.Event()

    def watch(self) -> None:
        """Block until the run ends. Subclasses with a child process raise here when it dies."""
        self._stopped.wait()

    def pid(self) -> int:
        """This process."""
        return os.getpid()


def watched_actor(cls: type[WatchedActor]) -> Any:
    """`cls` as a Ray actor class: what is called in a named group runs beside the other methods; a dead actor is not restarted."""
    return ray.remote(concurrency_groups={"watch": 1, "save": 1, "control": 1}, max_restarts=0, max_task_retries=0)(cls)


def redirect_output(log: Path) -> None:
    """Send this process's stdout and stderr, its children's and native code's included, to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=sys.stderr)
