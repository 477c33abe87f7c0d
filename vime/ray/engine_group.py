"""`EngineGroup`: the engines of one model as the driver sees them, and the replacement of those that fail.

    starting ──▶ idle ──sync or resend──▶ serving ──died, ill, lost in a sync──▶ ending ──▶ starting ──▶ ...

Only engines that serve are behind the router, and an engine serves only once a weight sync has proven that it holds the version
that the others hold: a replacement comes up with the start weights, and is idle until the next sync, or until the trainer has sent it
what it sent last. Engines of a frozen model serve as they come up. Without --use-fault-tolerance the first engine that ends, ends the
run. An engine that somebody else started is never ended: it is left out, and taken in again when it is well.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from vime.backends.vllm_utils.control_guard import SECRET_ENV
from vime.backends.vllm_utils.health import EngineWatch
from vime.backends.weight_transfer.control import EngineEndpoint
from vime.config import RunConfig
from vime.config.served import ServedModel
from vime.errors import EngineError, VimeError
from vime.ray.engine_actor import ExternalEngine, VLLMEngine
from vime.ray.placement_group import CPU_SHARE, Placement, gpu_share
from vime.ray.process import watched_actor
from vime.ray.supervisor import Supervisor
from vime.types import WeightSyncReport

__all__ = ["MOST_REPLACEMENTS", "EngineGroup"]

MOST_REPLACEMENTS = 3  # of one engine between two weight syncs; then something is broken that a new process does not mend
END_SECONDS = 30.0  # how long an engine that is replaced may take to end before its actor is killed

Route = Callable[[str, list[EngineEndpoint]], None]
Resend = Callable[[list[EngineEndpoint]], Any]


class State(Enum):
    """Where an engine is in its life; see the module."""

    ENDING = "ending"
    STARTING = "starting"
    IDLE = "idle"
    SERVING = "serving"


@dataclass(slots=True, kw_only=True)
class _Engine:
    """One engine, whichever process it is at present."""

    index: int  # among those of its model
    name: str
    actor: Any
    pending: Any  # reference to what its state waits for: its end, its start, or a report of a resend
    state: State = State.STARTING
    since: float = 0.0
    endpoint: EngineEndpoint | None = None
    watch: EngineWatch | None = None
    replaced: int = 0  # since the last weight sync


class EngineGroup:
    """See the module. All methods are the driver's, and none of them is called while another runs in another thread."""

    def __init__(
        self,
        config: RunConfig,
        model: ServedModel,
        supervisor: Supervisor,
        placement: Placement,
        log_dir: Path,
        run_id: str,
        *,
        first_bundle: int = 0,
    ) -> None:
        """Creates the engines; their servers begin to start at once. `first_bundle`: engines of other models before them."""
        self._config, self.model, self._supervisor = config, model, supervisor
        self._placement, self._first_bundle = placement, first_bundle
        self._log_dir, self._run_id = log_dir, run_id
        self._addresses = config.engine.rollout_external_engine_addrs if model.trained else []
        self._tokens = model.engine_tokens()
        self._tolerant = config.fault_tolerance.use_fault_tolerance
        self._route: Route | None = None
        self._resend: Resend | None = None
        self._version: int | None = None  # that the serving engines hold; None before the first sync
        self._declined = False  # the trainer has trained since it sent that version: there is nothing to resend
        self.say: Callable[[str], None] = print
        self._looking = False
        self._engines = [self._launch(index) for index in range(model.num_engines)]

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def names(self) -> list[str]:
        """Of all engines, in order."""
        return [engine.name for engine in self._engines]

    @property
    def serves(self) -> bool:
        """Whether any engine is behind the router."""
        return any(engine.state is State.SERVING for engine in self._engines)

    def starts(self) -> list[Any]:
        """References to the endpoints of the engines as they come up."""
        return [engine.pending for engine in self._engines]

    def serve(self, endpoints: Sequence[EngineEndpoint], route: Route) -> None:
        """All engines are up and behind the model's router, where `route(model, endpoints)` puts exactly these. They are watched now."""
        self._route = route
        for engine, endpoint in zip(self._engines, endpoints, strict=True):
            engine.endpoint = endpoint
            self._serve(engine)
        if self._tolerant:
            self._supervisor.on_look(self._look)

    def resend_through(self, resend: Resend) -> None:
        """`resend(endpoints)` begins to send what the trainer sent last to these engines; a reference to the report, or to None."""
        self._resend = resend

    def receivers(self) -> list[EngineEndpoint]:
        """The engines that a weight sync is to reach; waits until there is one.

        Raises:
            DeadlineError: none came up within --vllm-start-deadline.
        """
        if self._tolerant:
            self._look()
            self._supervisor.wait_for(
                lambda: bool(self._up()),
                peer=", ".join(self.names),
                phase="start of an engine for a weight sync",
                deadline=self._config.engine.vllm_start_deadline + END_SECONDS,
                progress=lambda: ", ".join(f"{engine.name} is {engine.state.value}" for engine in self._engines),
                cure=f"Their logs are in {self._log_dir}.",
            )
        return [engine.endpoint for engine in self._up() if engine.endpoint is not None]

    def synced(self, report: WeightSyncReport, receivers: Sequence[EngineEndpoint]) -> None:
        """A weight sync to `receivers` is over: who was lost in it is replaced, who was idle serves."""
        self._version, self._declined = report.version, False
        for engine in self._engines:
            engine.replaced = 0
        self._settle(report, receivers)

    def shutdown_refs(self) -> list[Any]:
        """Begin to end the engines; references to wait for."""
        for engine in self._engines:
            if engine.watch is not None:
                engine.watch.stop()
        return [engine.actor.stop.remote() for engine in self._engines]

    def kill(self) -> None:
        """End the actors; never raises."""
        for engine in self._engines:
            _kill(engine.actor)

    def _up(self) -> list[_Engine]:
        """Engines that can be sent weights now."""
        return [e for e in self._engines if e.state is State.SERVING or (e.state is State.IDLE and e.pending is None)]

    def _launch(self, index: int) -> _Engine:
        name = f"engine {index}" if self.model.trained else f"{self.model.name} engine {index}"
        config = self._config.for_engine(self.model, self._tokens[index])
        log = self._log(name)
        if self._addresses:
            url = f"http://{self._addresses[index].replace('localhost', '127.0.0.1')}"
            endpoint = EngineEndpoint(name=name, url=url, secret=os.environ.get(SECRET_ENV, ""))
            actor = watched_actor(ExternalEngine).options(num_cpus=0).remote(config, endpoint, str(log))
        else:
            where = self._placement.engine(self._first_bundle + index)
            options = {"num_cpus": CPU_SHARE, "num_gpus": gpu_share(self._config), "scheduling_strategy": where}
            actor = watched_actor(VLLMEngine).options(**options).remote(config, index, name, str(log), self._run_id)
        engine = _Engine(index=index, name=name, actor=actor, pending=None, since=time.monotonic())
        self._supervisor.watch(name, actor.watch.options(concurrency_group="watch").remote(), log)
        engine.pending = actor.start.remote()
        return engine

    def _log(self, name: str) -> Path:
        return self._log_dir / f"{re.sub(r'[^A-Za-z0-9]', '_', name)}.log"

    def _serve(self, engine: _Engine) -> None:
        assert engine.endpoint is not None
        engine.state, engine.pending = State.SERVING, None
        if self._tolerant:
            self._supervisor.survive(engine.name, lambda error: self._fail(engine, str(error)))
            engine.watch = EngineWatch(engine.endpoint, self._config.fault_tolerance)

    def _settle(self, report: WeightSyncReport, receivers: Sequence[EngineEndpoint]) -> None:
        lost = dict(report.lost)
        urls = {endpoint.url for endpoint in receivers} - lost.keys()
        joining = [e for e in self._engines if e.state is State.IDLE and e.endpoint is not None and e.endpoint.url in urls]
        for engine in joining:
            self._serve(engine)
        if joining:
            self._put_behind_router()
            self.say(f"{' and '.join(engine.name for engine in joining)} replaced, and serving weight version {report.version}")
        for engine in self._engines:
            if engine.endpoint is not None and engine.endpoint.url in lost:
                self._fail(engine, f"lost in the sync of weight version {report.version}: {lost[engine.endpoint.url]}")

    def _put_behind_router(self) -> None:
        assert self._route is not None
        self._route(self.model.name, [e.endpoint for e in self._engines if e.state is State.SERVING and e.endpoint is not None])

    def _fail(self, engine: _Engine, why: str) -> None:
        """Take the engine out and begin to replace it. EngineError when that was tried too often."""
        if engine.watch is not None:
            engine.watch.stop()
            engine.watch = None
        self._supervisor.unwatch(engine.name)
        served = engine.state is State.SERVING
        engine.state, engine.since, engine.endpoint = State.ENDING, time.monotonic(), None
        engine.pending = engine.actor.stop.remote()
        engine.replaced += 1
        if engine.replaced > MOST_REPLACEMENTS:
            raise EngineError(
                f"{engine.name} failed {engine.replaced} times since the last weight sync, so the run ends. The last time: {why}\n"
                f"Its log: {self._log(engine.name)}"
            )
        self.say(f"{engine.name} is replaced: {why.splitlines()[0]}")
        if served:
            self._put_behind_router()

    def _look(self) -> None:
        """One look at each engine: what waited for something that has come, goes on. Waits of its own do not look again."""
        if self._looking:
            return
        self._looking = True
        try:
            for engine in self._engines:
                self._look_at(engine)
        finally:
            self._looking = False

    def _look_at(self, engine: _Engine) -> None:
        if engine.state is State.SERVING:
            if engine.watch is not None and engine.watch.illness is not None:
                self._fail(engine, f"it is ill: {engine.watch.illness}")
        elif engine.state is State.ENDING:
            if _is_over(engine.pending) or time.monotonic() - engine.since > END_SECONDS:
                self._relaunch(engine)
        elif engine.state is State.STARTING:
            if _is_over(engine.pending):
                self._started(engine)
        elif engine.pending is None:
            self._begin_resend(engine)
        elif _is_over(engine.pending):
            self._resent(engine)

    def _relaunch(self, engine: _Engine) -> None:
        _kill(engine.actor)
        new = self._launch(engine.index)
        engine.actor, engine.pending, engine.state, engine.since = new.actor, new.pending, State.STARTING, new.since
        self._supervisor.survive(engine.name, lambda error: self._fail(engine, str(error)))

    def _started(self, engine: _Engine) -> None:
        try:
            engine.endpoint = ray.get(engine.pending, timeout=60.0)
        except RayError as error:
            cause = getattr(error, "cause", None)
            self._fail(engine, f"it did not start: {cause if isinstance(cause, VimeError) else error}")
            return
        engine.state, engine.pending = State.IDLE, None

    def _begin_resend(self, engine: _Engine) -> None:
        """Bring an idle engine to the version of the others, where that can be done now."""
        assert engine.endpoint is not None
        if not self.model.trained or self._config.debug.debug_rollout_only:  # nobody sends weights: all hold what they started from
            self._serve(engine)
            self._put_behind_router()
            self.say(f"{engine.name} replaced, and serving")
        elif self._resend is not None and self._version is not None and not self._declined:
            engine.pending = self._resend([engine.endpoint])

    def _resent(self, engine: _Engine) -> None:
        assert engine.endpoint is not None
        ref, engine.pending = engine.pending, None
        report = self._supervisor.get([ref], names=["trainer 0"], phase="weight resend", deadline=60.0)[0]
        if report is None:
            self._declined = True
        elif report.version == self._version or report.lost:
            self._settle(report, [engine.endpoint])


def _is_over(ref: Any) -> bool:
    return bool(ray.wait([ref], timeout=0)[0])


def _kill(actor: Any) -> None:
    with contextlib.suppress(Exception):  # it may be gone already
        ray.kill(actor)
