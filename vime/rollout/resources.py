"""What a whole run of rollouts shares: the tokenizer, the processes that check answers, the event loop and its connections.

Held by the data source (which lives as long as the run) and handed to each rollout; nothing here is global.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Coroutine
from typing import Any

import aiohttp

from vime.data.tokenizer import load_tokenizer
from vime.rollout.rm_hub.workers import RewardWorkers
from vime.utils.http_utils import new_session

__all__ = ["KeptLoop", "RolloutResources"]

CANCEL_SECONDS = 10.0  # how long work that a step left behind may take to end


class KeptLoop:
    """An event loop that stays from one step to the next, with one HTTP session: connections are made once, not at every step."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._session: aiohttp.ClientSession | None = None
        self._busy = threading.Lock()

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` as `asyncio.run` does; tasks that it leaves behind are cancelled. In a loop of its own while this one is busy."""
        if not self._busy.acquire(blocking=False):
            return asyncio.run(work)
        try:
            return self._runner.run(self._bounded(work), context=contextvars.copy_context())
        finally:
            self._busy.release()

    async def _bounded[T](self, work: Coroutine[Any, Any, T]) -> T:
        for _ in range(3):  # turns of the loop: what the servers closed in the meantime is noticed before it is used
            await asyncio.sleep(0)
        try:
            return await work
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=CANCEL_SECONDS)

    def session(self) -> aiohttp.ClientSession | None:
        """The session, for code that runs in this loop; None in any other."""
        if not self._busy.locked() or asyncio.get_running_loop() is not self._runner.get_loop():
            return None
        if self._session is None or self._session.closed:
            self._session = new_session()
        return self._session

    def close(self) -> None:
        """Close session and loop. Where another loop runs in this thread a thread does it; while a step runs, nothing is done."""
        if asyncio._get_running_loop() is None:
            self._close()
        else:
            thread = threading.Thread(target=self._close, name="rollout-loop-close")
            thread.start()
            thread.join()

    def _close(self) -> None:
        if not self._busy.acquire(blocking=False):
            return
        try:
            session, self._session = self._session, None
            if session is not None:
                self._runner.run(session.close())
            with contextlib.suppress(RuntimeError):  # at the interpreter's end its executor can start no thread to wait in
                self._runner.close()
        finally:
            self._busy.release()


class RolloutResources:
    """Made once per run; parts are started when first used."""

    def __init__(self, hf_checkpoint: str | None) -> None:
        self._path = hf_checkpoint
        self._tokenizer: Any = None
        self._loop: KeptLoop | None = None
        self._end_of_loop: Any = None
        self.reward_workers = RewardWorkers()
        self.hooks: dict[tuple[str, str], Any] = {}  # users' functions by (path, kind), loaded and checked once

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._path)
        return self._tokenizer

    @property
    def loop(self) -> KeptLoop:
        """The event loop that the run's steps share."""
        if self._loop is None:
            self._loop = KeptLoop()
            self._end_of_loop = weakref.finalize(self, self._loop.close)
        return self._loop

    def session(self) -> aiohttp.ClientSession | None:
        """The run's HTTP session for code that runs in `loop`; None elsewhere."""
        return self._loop.session() if self._loop is not None else None

    def close(self) -> None:
        """End the worker processes, close the loop and its connections. Also happens by itself when this process ends."""
        self.reward_workers.close()
        if self._end_of_loop is not None:
            self._end_of_loop()
        self._loop = self._end_of_loop = None
