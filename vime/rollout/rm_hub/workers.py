"""Processes that run heavy rewards: no verifier can block the event loop, or hang the run.

score() ──▶ queue ──▶ one thread per worker ──JSON line──▶ worker process (worker_main)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any

from vime.errors import DataError, GenerationError

__all__ = ["RewardWorkers"]

Request = dict[str, Any]


class RewardWorkers:
    """At most `count` worker processes, started when first needed. Can be used from any event loop."""

    def __init__(self, count: int | None = None, timeout: float = 30.0) -> None:
        """`count`: default half the cores, at most 4. `timeout`: seconds after which a verifier is killed."""
        self._count = count or max(1, min(4, (os.cpu_count() or 2) // 2))
        self._timeout = timeout
        self._queue: queue.SimpleQueue[tuple[Request, Future[Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    async def score(self, rm_type: str, response: str, label: Any, metadata: dict[str, Any]) -> Any:
        """What the reward `rm_type` says of a response: a number or a dict.

        Raises:
            DataError: the label or the metadata is not what the reward needs.
            GenerationError: the verifier raised, died or hung on this answer. Counted; not a reward of 0.
        """
        request = {"rm_type": rm_type, "response": response, "label": label, "metadata": metadata}
        future: Future[Any] = Future()
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._serve, name=f"reward-worker-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queue.put((request, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the processes and wait for that; later calls of `score` start new ones."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            thread.join(timeout=self._timeout + 10)

    def _serve(self) -> None:
        """One thread: owns one process and feeds it until told to stop."""
        worker: _Worker | None = None
        while (item := self._queue.get()) is not None:
            request, future = item
            if not future.set_running_or_notify_cancel():
                continue
            worker = worker or _Worker()
            try:
                future.set_result(_reward_of(worker.ask(request, self._timeout), request))
            except GenerationError as error:
                if not worker.alive:
                    worker = None
                future.set_exception(error)
            except Exception as error:  # noqa: BLE001 - whatever it is belongs to the caller
                future.set_exception(error)
        if worker is not None:
            worker.end()


class _Worker:
    """One process, asked one thing at a time."""

    def __init__(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vime.rollout.rm_hub.worker_main"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )
        self.alive = True

    def ask(self, request: Request, timeout: float) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            line = json.dumps(request, default=str)
            stdin.write(line.encode() + b"\n")
            stdin.flush()
            with selectors.DefaultSelector() as ready:
                ready.register(stdout, selectors.EVENT_READ)
                if not ready.select(timeout):
                    raise GenerationError(
                        f"reward '{request['rm_type']}' did not judge an answer within {timeout:g} s; its worker was ended."
                    )
            reply = stdout.readline()
        except (GenerationError, OSError) as error:
            self.end()
            if isinstance(error, GenerationError):
                raise
            raise GenerationError(f"the worker of reward '{request['rm_type']}' broke off ({error}).") from error
        if not reply:
            code = self.end()
            raise GenerationError(f"the worker of reward '{request['rm_type']}' ended with status {code} while it judged an answer.")
        answer: dict[str, Any] = json.loads(reply)
        return answer

    def end(self) -> int:
        """Kill the process, reap it, close its pipes; returns its status."""
        self.alive = False
        self._process.kill()
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return code


def _reward_of(answer: dict[str, Any], request: Request) -> Any:
    if "fault" in answer:
        raise DataError(answer["fault"])
    if "failure" in answer:
        raise GenerationError(f"reward '{request['rm_type']}' raised on an answer: {answer['failure']}")
    return answer["reward"]
