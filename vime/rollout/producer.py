"""Rollouts in the background, ahead of the trainer, in a thread of their own. The rollout manager owns one.

    GroupProducer   our rollout function: groups all the time (continuous.py)
    StepProducer    a rollout function of the user's: it is called for the steps to come, one call after the other

Both: `take(step)` waits for a step's batch, `pause()` and `drain()` hold production, `resume(version)` lets it go on, `failure` is
what ended the thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from vime.errors import DeadlineError
from vime.rollout.base_types import RolloutFnTrainOutput
from vime.rollout.continuous import ContinuousCollector
from vime.rollout.generate_state import GenerateState
from vime.rollout.resources import RolloutResources

__all__ = ["GroupProducer", "Producer", "StepProducer"]

START_SECONDS = 60.0  # until the thread's event loop runs
GRACE_SECONDS = 30.0  # beyond --rollout-deadline, which speaks first and knows more
CLOSE_SECONDS = 30.0


class Producer(Protocol):
    """What the rollout manager needs of it."""

    @property
    def failure(self) -> Exception | None: ...

    def take(self, step: int) -> Any: ...
    def pause(self) -> None: ...
    def drain(self) -> None: ...
    def resume(self, version: int) -> None: ...
    def close(self) -> None: ...


class GroupProducer:
    """Runs a `ContinuousCollector`."""

    def __init__(self, args: Any, data_source: Any, *, first_step: int, num_steps: int, bound: int, version: int) -> None:
        """Starts the thread; groups are begun at the first `resume`. See `ContinuousCollector` for the numbers."""
        self._args, self._source = args, data_source
        self._numbers = {"first_step": first_step, "num_steps": num_steps, "bound": bound, "version": version}
        self._started: concurrent.futures.Future[ContinuousCollector] = concurrent.futures.Future()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="rollout-producer", daemon=True)
        self._thread.start()
        self._collector = self._started.result(START_SECONDS)

    @property
    def failure(self) -> Exception | None:
        """What ended the production; None while it goes on."""
        return self._collector.failure

    def take(self, step: int) -> RolloutFnTrainOutput:
        """The batch of `step`; see `ContinuousCollector.take_batch`."""
        return self._call(self._collector.take_batch(step), phase=f"batch of step {step}")

    def pause(self) -> None:
        """Begin no more groups."""
        self._call(self._now(self._collector.pause), phase="pause")

    def drain(self) -> None:
        """Begin no more groups, and wait until none is in flight."""
        self._call(self._collector.drain(), phase="drain")

    def resume(self, version: int) -> None:
        """The engines hold `version`: go on."""
        self._call(self._now(lambda: self._collector.resume(version)), phase="resume")

    def close(self) -> None:
        """Cancel what runs and end the thread."""
        if self._thread.is_alive() and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(CLOSE_SECONDS)

    async def _now(self, work: Callable[[], None]) -> None:
        work()

    def _call[T](self, work: Coroutine[Any, Any, T], *, phase: str) -> T:
        limit = self._args.rollout_deadline + GRACE_SECONDS
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(limit)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise DeadlineError(peer="the rollout producer", phase=phase, seconds=limit, cure="Its log is that of the manager.") from None

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # noqa: BLE001 - it is raised where somebody waits
            if not self._started.done():
                self._started.set_exception(error)
            elif self._collector.failure is None:
                self._collector.failure = error

    async def _serve(self) -> None:
        shared = getattr(self._source, "resources", None)
        resources = shared if isinstance(shared, RolloutResources) else RolloutResources(self._args.hf_checkpoint)
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with GenerateState(self._args, resources).running() as state:
                collector = ContinuousCollector(state, self._source, **self._numbers)
                self._started.set_result(collector)
                await self._stop.wait()
                await collector.close()
        finally:
            if resources is not shared:
                await asyncio.to_thread(resources.close)


class StepProducer:
    """Calls `rollout(step)` for one step after the other while step <= version + bound: as slime's train_async, `bound` steps ahead."""

    def __init__(
        self, rollout: Callable[[int], Any], *, first_step: int, num_steps: int, bound: int, version: int, deadline: float
    ) -> None:
        """Starts the thread; the first call is made at the first `resume`. `deadline`: seconds that one wait may take."""
        self._rollout, self._next, self._num_steps, self._bound = rollout, first_step, num_steps, bound
        self._version, self._deadline = version, deadline
        self.failure: Exception | None = None
        self._outputs: dict[int, Any] = {}
        self._open, self._running, self._closed = False, False, False
        self._changed = threading.Condition()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run), name="rollout-producer", daemon=True)
        self._thread.start()

    def take(self, step: int) -> Any:
        """What the rollout function returned for `step`. Raises what it raised, or DeadlineError."""
        with self._changed:
            self._wait_for(lambda: step in self._outputs, phase="generate", peer=f"the batch of step {step}")
            return self._outputs.pop(step)

    def pause(self) -> None:
        """As `drain`: a user's function is not called for an evaluation while another call of it runs."""
        self.drain()

    def drain(self) -> None:
        """Make no further call, and wait for the one that runs."""
        with self._changed:
            self._open = False
            self._wait_for(lambda: not self._running, phase="finish the call", peer=f"the rollout function at step {self._next}")

    def resume(self, version: int) -> None:
        """The engines hold `version`: go on."""
        with self._changed:
            self._version, self._open = version, True
            self._changed.notify_all()

    def close(self) -> None:
        """Make no further call. One that runs ends with the process: nobody can end another's thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait_for(self, condition: Callable[[], bool], *, phase: str, peer: str) -> None:
        end = time.monotonic() + self._deadline
        while self.failure is None and not condition():
            if not self._changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                cure = "Look for a slow engine, tool or judge; or raise --rollout-deadline."
                raise DeadlineError(peer=peer, phase=phase, seconds=self._deadline, progress=f"{len(self._outputs)} steps wait", cure=cure)
        if self.failure is not None:
            raise self.failure

    def _may_call(self) -> bool:
        return self._open and self._next <= self._version + self._bound and self._next < self._num_steps

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._may_call())
                if self._closed:
                    return
                step, self._running = self._next, True
                self._next += 1
            output, failure = None, None
            try:
                output = self._rollout(step)
            except Exception as error:  # noqa: BLE001 - raised by `take`, and by the manager's watch
                failure = error
            with self._changed:
                self._running, self.failure = False, failure
                self._outputs[step] = output
                self._changed.notify_all()
                if failure is not None:
                    return
