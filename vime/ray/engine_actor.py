"""One vLLM engine as a Ray actor: of a server that is ours it owns the process, the log and the end, of another's it knows the address."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from pathlib import Path
from typing import Any

from vime.backends.vllm_utils.control_guard import SECRET_ENV
from vime.backends.vllm_utils.handshake import greet_engine
from vime.backends.vllm_utils.health import EngineWatch
from vime.backends.vllm_utils.server import EngineServer
from vime.backends.weight_transfer.control import EngineControl, EngineEndpoint
from vime.config import RunConfig
from vime.errors import DeadlineError, EngineError
from vime.ray.process import WatchedActor

__all__ = ["ExternalEngine", "VLLMEngine"]

CHILD_POLL_SECONDS = 0.25


class VLLMEngine(WatchedActor):
    """An engine of ours, called `name`. Its server writes `log`."""

    def __init__(self, config: RunConfig, index: int, name: str, log: str, run_id: str) -> None:
        super().__init__(str(Path(log).with_suffix("")) + "_actor.log")
        self._config, self._name = config, name
        self._server = EngineServer(config, index=index, name=name, log_path=Path(log), run_id=run_id)

    def start(self) -> Any:
        """Wait until the engine answers; returns its endpoint (address and control secret)."""
        return self._server.wait_healthy(self._config.engine.vllm_start_deadline)

    def watch(self) -> None:
        """Return when the run ends; raise when the server process dies."""
        while not self._stopped.wait(CHILD_POLL_SECONDS):
            code = self._server.poll()
            if code is not None and not self._stopped.is_set():
                raise EngineError(f"{self._name} died (exit {code}).\n{self._server.log_tail()}")

    def stop(self) -> None:
        """End the server and all its processes."""
        self._stopped.set()
        self._server.stop()


class ExternalEngine(WatchedActor):
    """An engine that somebody else started and will end; it holds whatever weights its last run sent, until the first sync."""

    def __init__(self, config: RunConfig, endpoint: EngineEndpoint, log: str) -> None:
        super().__init__(log)
        self._config, self._endpoint = config, endpoint
        self._greeted = threading.Event()

    def start(self) -> EngineEndpoint:
        """Wait until the engine answers, and ask it what it is."""
        control, seconds = EngineControl.of(self._endpoint), self._config.engine.vllm_start_deadline
        where = f"{self._endpoint.name} at {self._endpoint.url} (--rollout-external-engine-addrs)"
        if not control.wait_healthy(seconds, self._stopped):
            cure = "Start it with `vime engine`, or leave the address out."
            raise DeadlineError(peer=where, phase="answer", seconds=seconds, progress="it cannot be reached", cure=cure)
        try:
            greet_engine(self._config, control)
        except EngineError as error:
            cure = f" Give this run the {SECRET_ENV} that the engine was started with." if "answered 403" in str(error) else ""
            raise EngineError(f"{error}{cure}") from error
        control.init_weight_update({})
        with contextlib.suppress(EngineError):  # its guard refuses that while its weights are half loaded: the first sync mends them
            control.resume()
        self._greeted.set()
        return self._endpoint

    def watch(self) -> None:
        """Return when the run ends; raise when the engine is ill. With --use-fault-tolerance the driver looks itself."""
        faults = self._config.fault_tolerance
        if faults.use_fault_tolerance:
            self._stopped.wait()
            return
        while not self._greeted.wait(CHILD_POLL_SECONDS):  # until then start() says what is wrong
            if self._stopped.is_set():
                return
        watch = EngineWatch(self._endpoint, dataclasses.replace(faults, rollout_health_check_first_wait=0.0))
        while not self._stopped.wait(CHILD_POLL_SECONDS):
            if watch.illness is not None:
                raise EngineError(f"{self._endpoint.name} at {self._endpoint.url} is ill: {watch.illness}")
        watch.stop()

    def stop(self) -> None:
        """Leave it."""
        self._stopped.set()
