"""Writing a distributed checkpoint that Megatron has planned: within the call, or by a thread while training goes on.

    plan (collective) ─▶ copies in host memory ─▶ write (each rank by itself) ─▶ complete (collective: `.metadata`, `metadata.json`)

Megatron plans who writes what. The writing is ours: its own asynchronous save forks the trainer, whose threads (gloo, Ray) may hold
locks that nobody in the child lets go of; of a write that failed it reports the type alone; and torch's zip writer, over a file
that refused a write, ends the process when the garbage collector finds it.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.storage import WriteResult

from vime.errors import CheckpointError, ResourceError

__all__ = ["Planned", "StateWriter"]

log = logging.getLogger(__name__)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Planned(TorchDistSaveShardedStrategy):
    """Megatron's strategy up to the plan. The request that `dist_checkpointing.save` returns with it goes to `StateWriter`."""

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, async_strategy: str) -> AsyncRequest:
        return AsyncRequest(None, (writer, planned[1]), [])


class StateWriter:
    """One state of the trainer on its way to the folder `path`; complete after `finish`.

    Without `held` it is written when `__init__` returns. With `held`, addresses of the storages that training goes on changing, it is
    written in the background: what is in them, or on a GPU, is copied to host memory first.
    """

    def __init__(self, path: str, request: AsyncRequest, *, held: Collection[int] | None = None) -> None:
        self.path = path
        self._writer: FileSystemWriterAsync
        self._writer, self._metadata = request.async_fn_args
        self._complete: Sequence[Callable[[], None]] = request.finalize_fns
        self._results: list[WriteResult] = []
        self._failure: str | None = None
        self._thread: threading.Thread | None = None
        if held is not None:
            self._copy(held)
            self._thread = threading.Thread(target=self._write, name="checkpoint writer", daemon=True)
            self._thread.start()
        else:
            self._write()

    def wait(self) -> None:
        """Until this rank has written, or failed to; `finish` tells which. Not collective."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Make the folder complete. Collective; waits for the slowest rank.

        Raises the same error on all ranks: ResourceError when there was no space, CheckpointError for another failure of a disk.
        """
        self.wait()
        failures: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, self._failure)
        results: list[list[WriteResult]] = [[]] * dist.get_world_size()
        dist.gather_object(self._results, results if dist.get_rank() == 0 else None)
        verdict = [next((f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None), None)]
        if verdict[0] is None and dist.get_rank() == 0:
            try:
                self._writer.finish(self._metadata, results)
            except OSError as error:
                verdict[0] = f"rank 0: {_said(error)}"
        self._agree(verdict)
        for complete in self._complete:
            try:
                complete()
            except OSError as error:  # rank 0 alone writes, and the others wait in the barrier that comes after it
                verdict[0] = f"rank 0: {_said(error)}"
                dist.barrier()
            self._agree(verdict)

    def _agree(self, verdict: list[str | None]) -> None:
        """Raise on all ranks what rank 0 says of the writing, if it failed. Collective."""
        dist.broadcast_object_list(verdict, src=0)
        if verdict[0] is not None:
            self._raise(verdict[0])

    def _raise(self, said: str) -> None:
        if any(os.strerror(code) in said for code in FULL):
            raise ResourceError(
                f"no space left on {self.path} for the trainer's state ({said}): free space and run the same command again; "
                "earlier commits are intact."
            )
        raise CheckpointError(f"the trainer's state could not be written into {self.path} ({said}); earlier commits are intact.")

    def _copy(self, held: Collection[int]) -> None:
        for _, _, (_, tensors) in self._writer.write_buckets:
            for number, (item, tensor) in enumerate(tensors):
                if tensor.device.type != "cpu" or tensor.untyped_storage().data_ptr() in held:
                    tensors[number] = (item, tensor.detach().to("cpu", copy=True))

    def _write(self) -> None:
        for bucket in self._writer.write_buckets:
            try:
                self._results += self._write_file(*bucket)
            except Exception as error:
                log.exception("writing %s failed", self.path)
                self._failure = _said(error)
                break
        for _, _, (objects, tensors) in self._writer.write_buckets:  # what was copied goes
            objects.clear()
            tensors.clear()

    def _write_file(self, path: str, key: str, data: tuple[list[Any], list[Any]]) -> list[WriteResult]:
        results = []
        with Path(path).open("wb") as file:
            stream = _Unfailing(file)
            for item, value in chain(data[0], ((item, tensor.detach().cpu()) for item, tensor in data[1])):
                results.append(
                    _write_item(self._writer.transforms, stream, value, item, key, serialization_format=SerializationFormat.TORCH_SAVE)
                )
                stream.check()
            file.flush()
            os.fsync(file.fileno())
        return results


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


class _Unfailing:
    """A file that raises nothing while torch's zip writer holds it: `check` raises what went wrong first."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
        return memoryview(data).nbytes

    def flush(self) -> None:
        if self._error is None:
            try:
                self._file.flush()
            except OSError as error:
                self._error = error

    def tell(self) -> int:
        return int(self._file.tell())

    def check(self) -> None:
        if self._error is not None:
            raise self._error
