"""Health of one engine, told by what it does: a thread lets it generate a token now and then.

An engine is ill when its server cannot be reached, when its core does not answer, and when within the time allowed it neither
answers the probe nor generates anything for anybody. So an engine with a long queue is well as long as the queue moves, and one
that is paused for a weight sync is well as long as its core answers: the sync has deadlines of its own.
"""

from __future__ import annotations

import threading
import time

from vime.backends.weight_transfer.control import EngineControl, EngineEndpoint
from vime.config.sections import FaultToleranceConfig
from vime.errors import DeadlineError, PeerError

__all__ = ["EngineWatch", "find_illness"]

_PROBE = [1, 2, 3]  # token ids
_LOOK_INTERVAL = 1.0  # seconds between looks at whether a busy engine gets on
_PROGRESS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")


def find_illness(control: EngineControl, seconds: float, stop: threading.Event | None = None) -> str | None:
    """One probe; what ails the engine, or None. Takes about twice `seconds` at most; `stop` ends it early, as well."""
    deadline = time.monotonic() + seconds
    try:
        if control.is_paused(seconds):
            return None
        before = _progress(control, seconds)
        try:
            control.prompt_log_probs(_PROBE, seconds)
            return None
        except PeerError as error:
            refused = error
        while True:
            if control.is_paused(seconds) or _progress(control, seconds) > before:
                return None
            if isinstance(refused, DeadlineError) or time.monotonic() > deadline or not control.healthy(seconds):
                return f"it generated nothing for {seconds:g} s: {refused}"
            if stop is not None and stop.wait(_LOOK_INTERVAL):
                return None
    except PeerError as error:
        return str(error)


def _progress(control: EngineControl, seconds: float) -> float:
    return sum(control.metric(name, seconds) for name in _PROGRESS)


class EngineWatch:
    """Probes an engine every `rollout_health_check_interval` seconds until it is ill or the watch is stopped."""

    def __init__(self, endpoint: EngineEndpoint, config: FaultToleranceConfig) -> None:
        """Begins at once; the first probe comes after `rollout_health_check_first_wait`."""
        self._control = EngineControl.of(endpoint, seconds=config.rollout_health_check_timeout)
        self._config = config
        self._stopped = threading.Event()
        self._illness: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch of {endpoint.name}", daemon=True)
        self._thread.start()

    @property
    def illness(self) -> str | None:
        """What ails the engine; None while it is well."""
        return self._illness

    def stop(self) -> None:
        """Probe no more; does not wait for a probe that is under way."""
        self._stopped.set()

    def _run(self) -> None:
        wait = self._config.rollout_health_check_first_wait
        while not self._stopped.wait(wait):
            try:
                found = find_illness(self._control, self._config.rollout_health_check_timeout, self._stopped)
            except Exception as error:  # noqa: BLE001 - a reply that cannot be read is an illness, too, and this thread is all that looks
                found = f"its answers to a probe cannot be read: {error!r}"
            if found is not None and not self._stopped.is_set():
                self._illness = found
                return
            wait = self._config.rollout_health_check_interval
