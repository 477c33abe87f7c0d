"""One vLLM engine: a Ray actor that owns the server process, its log, its health and its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vime.backends.vllm_utils.server import EngineServer
from vime.config import RunConfig
from vime.errors import EngineError
from vime.ray.process import WatchedActor

__all__ = ["VLLMEngine"]

CHILD_POLL_SECONDS = 0.25


class VLLMEngine(WatchedActor):
    """Engine `index`. Its server's log is `log_dir/engine_<index>.log`."""

    def __init__(self, config: RunConfig, index: int, log_dir: str, run_id: str) -> None:
        super().__init__(str(Path(log_dir) / f"engine_{index}_actor.log"))
        self._config, self._index = config, index
        self._server = EngineServer(config, index=index, log_path=Path(log_dir) / f"engine_{index}.log", run_id=run_id)

    def start(self) -> Any:
        """Wait until the engine answers; returns its endpoint (address and control secret)."""
        return self._server.wait_healthy(self._config.engine.vllm_start_deadline)

    def watch(self) -> None:
        """Return when the run ends; raise when the server process dies."""
        while not self._stopped.wait(CHILD_POLL_SECONDS):
            code = self._server.poll()
            if code is not None and not self._stopped.is_set():
                raise EngineError(f"engine {self._index} died (exit {code}).\n{self._server.log_tail()}")

    def stop(self) -> None:
        """End the server and all its processes."""
        self._stopped.set()
        self._server.stop()
