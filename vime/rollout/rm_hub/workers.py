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
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from vime.errors import DataError, GenerationError

__all__ = ["RewardWorkers"]

BATCH = 32  # answers sent to a worker at a time

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
        """One thread: owns one process and feeds it batches of what waits, until told to stop."""
        worker: _Worker | None = None
        while (first := self._queue.get()) is not None:
            batch = [item for item in [first, *self._waiting()] if item[1].running() or item[1].set_running_or_notify_cancel()]
            if not batch:
                continue
            worker = worker or _Worker()
            replies = worker.answers([request for request, _ in batch], self._timeout)
            for position, (request, future) in enumerate(batch):
                try:
                    future.set_result(_reward_of(next(replies), request))
                except _BrokeOffError as error:
                    worker.end()
                    worker = None
                    future.set_exception(GenerationError(f"reward '{request['rm_type']}': its worker {error} on an answer, and was ended."))
                    for item in batch[position + 1 :]:
                        self._queue.put(item)  # innocent: the next worker judges them
                    break
                except Exception as error:  # noqa: BLE001 - whatever it is belongs to the caller
                    future.set_exception(error)
        if worker is not None:
            worker.end()

    def _waiting(self) -> list[tuple[Request, Future[Any]]]:
        """What the queue holds now, BATCH - 1 items at most."""
        items: list[tuple[Request, Future[Any]]] = []
        with contextlib.suppress(queue.Empty):
            while len(items) < BATCH - 1:
                item = self._queue.get_nowait()
                if item is None:
                    self._queue.put(None)  # the order to stop keeps its place behind what waits
                    break
                items.append(item)
        return items


class _BrokeOffError(Exception):
    """A worker hung or died; says which."""


class _Worker:
    """One process that judges lines in order. Neither direction of the pipes can block us for ever."""

    def __init__(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "vime.rollout.rm_hub.worker_main"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, bufsize=0)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipes = (self._process.stdin, self._process.stdout)
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)

    def answers(self, requests: Sequence[Request], timeout: float) -> Iterator[dict[str, Any]]:
        """The reply to each request, in order. _BrokeOffError when one takes longer than `timeout` seconds."""
        stdin, stdout = self._pipes
        outgoing = memoryview(b"".join(json.dumps(request, default=str).encode() + b"\n" for request in requests))
        incoming = b""
        with selectors.DefaultSelector() as ready:
            ready.register(stdout, selectors.EVENT_READ)
            ready.register(stdin, selectors.EVENT_WRITE)
            for _ in requests:
                end = time.monotonic() + timeout
                while b"\n" not in incoming:
                    events = ready.select(max(0.0, end - time.monotonic()))
                    if not events:
                        raise _BrokeOffError(f"did not judge within {timeout:g} s")
                    for key, _ in events:
                        if key.fileobj is stdin:
                            outgoing = outgoing[self._write(outgoing) :]
                            if not outgoing:
                                ready.unregister(stdin)
                        else:
                            incoming += self._read()
                line, _, incoming = incoming.partition(b"\n")
                yield json.loads(line)

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._pipes[0].fileno(), data[:65536])
        except BrokenPipeError as error:
            raise _BrokeOffError("died") from error

    def _read(self) -> bytes:
        chunk = os.read(self._pipes[1].fileno(), 65536)
        if not chunk:
            raise _BrokeOffError("died")
        return chunk

    def end(self) -> None:
        """Kill the process, reap it, close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()


def _reward_of(answer: dict[str, Any], request: Request) -> Any:
    if "fault" in answer:
        raise DataError(answer["fault"])
    if "failure" in answer:
        raise GenerationError(f"reward '{request['rm_type']}' raised on an answer: {answer['failure']}")
    return answer["reward"]
