"""A child under the supervisor: its tree ends with it, with us, and with nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from vime.backends.vllm_utils.process import LOOPBACK, PortClaim, ServerProcess
from vime.errors import DeadlineError, EngineError, ResourceError

# a server that ignores SIGTERM, has a grandchild in a session of its own, and maps shared memory under a name it never removes
STUBBORN = """
import mmap, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open("/dev/shm/" + sys.argv[1], "w+b") as file:
    file.write(bytes(4096)); file.flush()
    memory = mmap.mmap(file.fileno(), 4096)
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
print("ready", flush=True)
time.sleep(600)
"""

PARENT = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from tests.unit.backends.vllm_utils.test_server_process import STUBBORN, start, wait
server = start(pathlib.Path(sys.argv[2]), STUBBORN, sys.argv[3])
wait(server, "ready")
print(server.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path(f"/dev/shm/vime-unit-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


def start(tmp_path: Path, code: str, *args: str) -> ServerProcess:
    command = [sys.executable, "-S", "-c", code, *args]
    return ServerProcess("a server", command, env=dict(os.environ), log_path=tmp_path / "server.log", grace=0.2)


def wait(server: ServerProcess, word: str, seconds: float = 30.0) -> list[psutil.Process]:
    server.wait_ready(lambda: word in server.log_tail(), seconds, cure="")
    return [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]


def test_stop_ends_the_whole_tree_and_removes_its_shared_memory(tmp_path: Path, segment: Path) -> None:
    server = start(tmp_path, STUBBORN, segment.name)
    tree = wait(server, "ready")
    assert len(tree) == 3
    assert segment.exists()
    scratch = Path(server._scratch)
    assert scratch.is_dir()
    server.stop()
    server.stop()
    assert server.poll() == 0
    assert not any(process.is_running() for process in tree)
    assert not segment.exists()
    assert not scratch.exists()


def test_the_tree_dies_with_us(tmp_path: Path, segment: Path) -> None:
    root = str(Path(__file__).parents[4])
    argv = [sys.executable, "-c", PARENT, root, str(tmp_path), segment.name]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        supervisor = psutil.Process(int(parent.stdout.readline()))
        tree = [supervisor, *supervisor.children(recursive=True)]
        os.kill(parent.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(tree, timeout=20)
    assert alive == []
    assert not segment.exists()


def test_stop_ends_the_tree_even_when_the_supervisor_was_killed(tmp_path: Path, segment: Path) -> None:
    server = start(tmp_path, STUBBORN, segment.name)
    tree = wait(server, "ready")
    os.kill(server.pid, signal.SIGKILL)
    scratch = Path(server._scratch)
    server.stop()
    assert server.poll() == -9
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in tree)
    assert not scratch.exists()


def test_a_child_that_dies_while_starting_is_told_at_once_with_its_last_words(tmp_path: Path) -> None:
    server = start(tmp_path, "import sys; print('no such weights'); sys.exit(3)")
    with pytest.raises(EngineError, match=r"a server ended with status 3 before it was ready\. Cure\.\n.*\nno such weights"):
        server.wait_ready(lambda: False, 60.0, cure="Cure.")
    server.stop()


def test_a_child_that_a_signal_ended_has_128_plus_its_number(tmp_path: Path) -> None:
    server = start(tmp_path, "import os; os.kill(os.getpid(), 11)")
    with pytest.raises(EngineError, match="status 139"):
        server.wait_ready(lambda: False, 60.0, cure="")
    server.stop()


def test_a_child_that_never_gets_ready_is_a_deadline_with_its_last_line(tmp_path: Path) -> None:
    server = start(tmp_path, "import time; print('loading', flush=True); time.sleep(600)")
    wait(server, "loading")
    with pytest.raises(DeadlineError, match=r"a server did not finish 'start' within 0\.1 s \(last progress: loading\)"):
        server.wait_ready(lambda: False, 0.1, cure="")
    server.stop()


def test_an_older_log_is_kept_and_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("an older run\n")
    server = start(tmp_path, "print('a newer run')")
    with pytest.raises(EngineError) as caught:
        server.wait_ready(lambda: False, 60.0, cure="")
    server.stop()
    assert "an older run" not in str(caught.value)
    assert (tmp_path / "server.log").read_text() == "an older run\na newer run\n"


def test_a_claimed_port_can_be_bound_by_the_server_it_is_kept_for_and_not_claimed_again() -> None:
    claim = PortClaim(None, what="a test")
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((LOOPBACK, claim.port))
        server.listen()
        claim.close()
        with pytest.raises(ResourceError, match=f"Port {claim.port} for another"):
            PortClaim(claim.port, what="another")


def test_the_first_error_is_shown_before_the_last_lines(tmp_path):
    lines = ["(Worker pid=9) ERROR 11-29 16:38:29 [x.py:1] RuntimeError: head_dim=16 is not supported", *["noise"] * 40]
    code = f"print({chr(10).join(lines)!r}); import sys; sys.exit(3)"
    process = ServerProcess("engine 0", [sys.executable, "-c", code], env=dict(os.environ), log_path=tmp_path / "log")
    with pytest.raises(EngineError, match="first error: RuntimeError: head_dim=16 is not supported\n"):
        process.wait_ready(lambda: False, 60.0, cure="")
    process.stop()
