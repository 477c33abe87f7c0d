"""A rollout function as slime's fully-async example writes it: one thread for the process keeps a pool of groups at work across calls."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

from vime.rollout.base_types import RolloutFnTrainOutput
from vime.rollout.vllm_rollout import GenerateState, generate_and_rm_group
from vime.utils.types import Sample

POOL = 3  # groups at work

_worker: PoolWorker | None = None


class PoolWorker:
    """Feeds itself from the data source; finished groups wait in a queue."""

    def __init__(self, args: Any, data_source: Any) -> None:
        self.args, self.source = args, data_source
        self.finished: queue.Queue[Any] = queue.Queue()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._work()), daemon=True)
        self.thread.start()

    async def _work(self) -> None:
        state = GenerateState(self.args)
        running: set[asyncio.Task[Any]] = set()
        while not self.stop.is_set():
            while len(running) < POOL:
                (group,) = self.source.get_samples(1)
                running.add(asyncio.create_task(generate_and_rm_group(self.args, group, dict(state.sampling_params))))
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self.finished.put(task.result())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def generate_rollout_fully_async(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """The first groups that are finished; aborted ones go back."""
    global _worker
    if _worker is None:
        _worker = PoolWorker(args, data_source)
    groups: list[Any] = []
    while len(groups) < args.rollout_batch_size:
        group = _worker.finished.get(timeout=30.0)
        if any(sample.status is Sample.Status.ABORTED for sample in group):
            data_source.add_samples([group])
        else:
            groups.append(group)
    return RolloutFnTrainOutput(samples=sorted(groups, key=lambda group: group[0].index))


def stop_worker() -> None:
    """End the pool."""
    global _worker
    if _worker is not None:
        _worker.stop.set()
        _worker.thread.join(30.0)
    _worker = None
