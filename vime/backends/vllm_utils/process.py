"""A server as our child process: started under the supervisor, with a log file, a readiness probe and a certain end."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vime.backends.vllm_utils.supervisor import mapped_segments
from vime.errors import DeadlineError, EngineError, ResourceError

__all__ = ["LOOPBACK", "PortClaim", "ServerProcess", "new_secret"]

LOOPBACK = "127.0.0.1"
_LOG_PREFIX = re.compile(r"^\(.*? pid=\d+\) ERROR [\d:. -]+\[\S+\] ")  # vLLM's
_ERROR_LINE = re.compile(r"^[A-Z]\w*(Error|Exception): ")  # the last line of a Python traceback
_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_SOCKET_PATH_LIMIT = 108  # bytes, sockaddr_un.sun_path
_SCRATCH_TAIL = len("/vime-12345678/") + 36  # our folder, and a uuid as vLLM names its sockets
_PROBE_INTERVAL = 0.1  # seconds between looks at a server that is starting
_STOP_MARGIN = 20.0  # seconds beyond the grace period until the supervisor must have ended


def new_secret() -> str:
    """A fresh secret for an engine's control paths."""
    return secrets.token_hex(16)


def _scratch_folder() -> str:
    """A private folder for the server's sockets and temporary files; the supervisor removes it.

    vLLM's sockets lie in it, and a socket's path must be shorter than 108 bytes: a long TMPDIR cannot hold it.
    """
    base = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="vime-", dir=base if len(base) + _SCRATCH_TAIL < _SOCKET_PATH_LIMIT else "/tmp")


class PortClaim:
    """A loopback port kept for a server that is starting.

    The socket is bound and does not listen, with SO_REUSEADDR as servers set it: the server can bind beside it, and nobody
    else is given the port. Close it once the server listens.
    """

    def __init__(self, port: int | None, *, what: str) -> None:
        """The given port, or any free one. ResourceError when the given one is taken."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((LOOPBACK, port or 0))
        except OSError as error:
            self._socket.close()
            reason = f"Port {port} for {what} cannot be had on {LOOPBACK} ({error.strerror})"
            raise ResourceError(f"{reason}. Choose another, or end the process that listens there.") from error
        self.port = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Give the claim up; a second call does nothing."""
        self._socket.close()


class ServerProcess:
    """One server and all its descendants.

    Its end is certain: `stop()` ends the whole tree and checks that it is gone, and when this process dies, however that
    happens, the supervisor does the same. Not safe for use by several threads at once.
    """

    def __init__(self, name: str, command: Sequence[str], *, env: Mapping[str, str], log_path: Path, grace: float = 5.0) -> None:
        """`name` appears in messages; `env` is the complete environment; the log is appended to; `grace` in seconds."""
        self.name = name
        self.log_path = log_path
        self._grace = grace
        self._segments: set[str] = set()  # shared memory that the tree held when it became ready
        self._scratch = _scratch_folder()
        control_read, self._control = os.pipe()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        supervisor = [sys.executable, "-S", "-I", str(_SUPERVISOR), str(os.getpid()), str(control_read), str(grace), self._scratch, "--"]
        full_env = {**env, "TMPDIR": self._scratch, "VLLM_RPC_BASE_PATH": self._scratch}
        try:
            with log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [*supervisor, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=full_env,
                    pass_fds=(control_read,),
                    start_new_session=True,
                )
        except OSError as error:
            os.close(self._control)
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise EngineError(f"{name} could not be started: {error}") from error
        finally:
            os.close(control_read)

    @property
    def pid(self) -> int:
        """The supervisor's process id: the root of the tree."""
        return self._process.pid

    def poll(self) -> int | None:
        """None while the server runs, else its exit status."""
        return self._process.poll()

    def log_tail(self, lines: int = 12) -> str:
        """The last lines this server wrote to its log, and before them the first error it wrote: what follows hides the cause."""
        with self.log_path.open("rb") as log:
            log.seek(max(self._log_start, self.log_path.stat().st_size - 256 * 1024))
            written = log.read().decode("utf-8", "replace").rstrip().splitlines()
        errors = [line for line in (_LOG_PREFIX.sub("", raw) for raw in written) if _ERROR_LINE.match(line)]
        last = written[-lines:]
        if lines > 1 and errors and not any(errors[0] in line for line in last):
            last = [f"first error: {errors[0]}", "...", *last]
        return "\n".join(last)

    def wait_ready(self, probe: Callable[[], bool], seconds: float, *, cure: str) -> None:
        """Return as soon as `probe()` is true. EngineError at once when the server ends, DeadlineError after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            status = self.poll()
            if status is not None:
                raise EngineError(
                    f"{self.name} ended with status {status} before it was ready. {cure}\nLast lines of {self.log_path}:\n{self.log_tail()}"
                )
            if probe():
                self._segments = mapped_segments(self._processes())
                return
            if time.monotonic() > deadline:
                last = self.log_tail(1) or "nothing logged"
                raise DeadlineError(peer=self.name, phase="start", seconds=seconds, progress=last, cure=f"{cure} Log: {self.log_path}")
            time.sleep(_PROBE_INTERVAL)  # a bounded poll of another process; it has no event that we could wait for

    def stop(self) -> None:
        """End the whole tree; returns when it is gone. A second call does nothing."""
        if self._control >= 0:
            os.close(self._control)
            self._control = -1
        limit = self._grace + _STOP_MARGIN
        try:
            self._process.wait(limit)
        except subprocess.TimeoutExpired as error:
            cure = f"Look at process {self.pid} and its children."
            raise DeadlineError(peer=self.name, phase="stop", seconds=limit, cure=cure) from error
        if self._process.returncode < 0:
            self._sweep()

    def _processes(self) -> list[int]:
        """The tree's living processes, which are known by their scratch folder."""
        return _processes_with(f"TMPDIR={self._scratch}".encode())

    def _sweep(self) -> None:
        """The supervisor itself was killed: do its work."""
        deadline = time.monotonic() + _STOP_MARGIN
        segments = set(self._segments)
        while left := self._processes():
            segments |= mapped_segments(left)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise DeadlineError(peer=self.name, phase="stop", seconds=_STOP_MARGIN, progress=f"still there: {left}")
            time.sleep(_PROBE_INTERVAL)  # they are no children of ours: the kernel tells us nothing
        for path in segments:
            Path(path).unlink(missing_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)


def _processes_with(mark: bytes) -> list[int]:
    """Living processes (no zombies) that have `mark` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
