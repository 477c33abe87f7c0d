"""The life of an engine's process tree: how it fails to start, and how it ends."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.integration.conftest import START_SECONDS, engine_config
from vime.backends.vllm_utils.server import EngineServer
from vime.errors import EngineError, ResourceError

pytestmark = pytest.mark.integration


def test_a_bad_model_folder_ends_the_start_with_the_log(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "no_such_model"}')
    server = EngineServer(engine_config(tmp_path / "model"), index=3, log_path=tmp_path / "engine.log", run_id="bad")
    tree = [psutil.Process(server.pid)]
    with pytest.raises(EngineError, match=r"engine 3 of run bad ended with status \d+ before it was ready") as caught:
        server.wait_healthy(START_SECONDS)
    assert "no_such_model" in str(caught.value)
    server.stop()
    assert not any(process.is_running() for process in tree)


def test_a_fixed_port_that_is_taken_is_refused_at_once(engine: EngineServer, tiny_model: Path, tmp_path: Path) -> None:
    port = int(engine.endpoint.url.rsplit(":", 1)[1])
    with pytest.raises(ResourceError, match=f"Port {port} "):
        EngineServer(engine_config(tiny_model), index=1, log_path=tmp_path / "engine.log", run_id="x", port=port)
