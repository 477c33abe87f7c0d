"""The life of an engine's process tree: how it fails to start, and how it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.conftest import START_SECONDS, engine_config
from vime.backends.vllm_utils.server import EngineServer
from vime.errors import EngineError, ResourceError

pytestmark = pytest.mark.integration

PARENT = """
import sys, pathlib
from tests.integration.conftest import engine_config
from vime.backends.vllm_utils.server import EngineServer
server = EngineServer(engine_config(pathlib.Path(sys.argv[1])), index=0, log_path=pathlib.Path(sys.argv[2]), run_id="parent")
server.wait_healthy(240.0)
print("healthy", flush=True)
sys.stdin.read()
"""


def test_a_bad_model_folder_ends_the_start_with_the_log(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "no_such_model"}')
    begun = time.monotonic()
    server = EngineServer(engine_config(tmp_path / "model"), index=3, log_path=tmp_path / "engine.log", run_id="bad")
    tree = [psutil.Process(server.pid)]
    with pytest.raises(EngineError, match=r"engine 3 of run bad ended with status \d+ before it was ready") as caught:
        server.wait_healthy(START_SECONDS)
    assert "no_such_model" in str(caught.value)
    assert time.monotonic() - begun < START_SECONDS / 2
    server.stop()
    assert not any(process.is_running() for process in tree)


def test_a_fixed_port_that_is_taken_is_refused_at_once(engine: EngineServer, tiny_model: Path, tmp_path: Path) -> None:
    port = int(engine.endpoint.url.rsplit(":", 1)[1])
    with pytest.raises(ResourceError, match=f"Port {port} "):
        EngineServer(engine_config(tiny_model), index=1, log_path=tmp_path / "engine.log", run_id="x", port=port)


def test_killing_the_parent_leaves_no_process_no_segment_and_no_file(tiny_model: Path, tmp_path: Path) -> None:
    scratch = Path(tempfile.mkdtemp(dir="/tmp", prefix="vt"))  # short: engines keep sockets there
    env = dict(os.environ, TMPDIR=str(scratch), PYTHONPATH=str(Path(__file__).parents[3]))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tiny_model), str(tmp_path / "engine.log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "healthy\n", (tmp_path / "engine.log").read_text()[-2000:]
    tree = psutil.Process(parent.pid).children(recursive=True)
    names = {process.name() for process in tree}
    segments = {path for process in tree for path in mapped_segments(process)}
    assert len(tree) >= 4, names
    assert segments
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs(tree, timeout=20)
    assert alive == []
    assert [path for path in segments if path.exists()] == []
    assert [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor")] == []
    shutil.rmtree(scratch)


def mapped_segments(process: psutil.Process) -> set[Path]:
    text = Path(f"/proc/{process.pid}/maps").read_text()
    return {Path(path) for path in re.findall(r"(/dev/shm/\S+)$", text, re.MULTILINE)}
