"""Shared memory between the trainer and the engines of one host: named segments, and the layout of a bucket of tensors.

A segment is a file of the shared-memory file system, so Python's resource tracker has no part in it: the trainer makes it,
the engines map it by name, and the trainer removes the name as soon as all have answered. A trainer that is killed in
between leaves a name without a lock on it, which `remove_stale_segments` removes at the next start of anything.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from vime.errors import ResourceError

__all__ = ["ALIGNMENT", "SHM_DIR", "Segment", "TensorSpec", "layout", "remove_stale_segments"]

SHM_DIR = Path("/dev/shm")
ALIGNMENT = 64  # bytes; every tensor of a bucket starts at a multiple
_PREFIX = "vime-weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Where one tensor lies in a bucket. Example: name="lm_head.weight", dtype="float32", shape=(320, 64), offset=4096."""

    name: str
    dtype: str  # torch's name without "torch."
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the bucket
    num_bytes: int

    def to_wire(self) -> dict[str, object]:
        """JSON-ready form, as it goes to the engines."""
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape), "offset": self.offset, "num_bytes": self.num_bytes}


def layout(tensors: list[tuple[str, str, tuple[int, ...], int]]) -> tuple[list[TensorSpec], int]:
    """Offsets for (name, dtype, shape, bytes) in their order, and the bucket's size in bytes."""
    specs, offset = [], 0
    for name, dtype, shape, num_bytes in tensors:
        specs.append(TensorSpec(name=name, dtype=dtype, shape=shape, offset=offset, num_bytes=num_bytes))
        offset += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return specs, offset


class Segment:
    """A mapped piece of shared memory. `create` makes and owns the name; `attach` maps an existing one."""

    def __init__(self, name: str, memory: mmap.mmap, *, lock: int | None) -> None:
        """`lock` is the maker's locked descriptor; None for who attached."""
        self.name = name
        self.memory = memory
        self._lock = lock

    @classmethod
    def create(cls, run_id: str, num_bytes: int) -> Self:
        """A new segment with all its pages reserved; ResourceError when there is no room for them."""
        size = max(num_bytes, mmap.PAGESIZE)
        _check_room(size)
        name = f"{_PREFIX}-{run_id}-{os.getpid()}-{secrets.token_hex(4)}"
        fd = os.open(SHM_DIR / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # held while we live: how others tell our segment from a dead trainer's
            if os.fstat(fd).st_nlink == 0:  # another process took it for stale in the instant before the lock
                os.close(fd)
                return cls.create(run_id, num_bytes)
            os.posix_fallocate(fd, 0, size)  # reserve now: a full file system would otherwise be a SIGBUS on the first write
            return cls(name, mmap.mmap(fd, size), lock=fd)
        except OSError as error:
            (SHM_DIR / name).unlink(missing_ok=True)
            os.close(fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise _no_room(size, _free_bytes()) from error
            raise

    @classmethod
    def attach(cls, name: str) -> Self:
        """Map a segment that another process made; FileNotFoundError when the name is gone."""
        if not name.startswith(_PREFIX) or "/" in name:
            raise ValueError(f"'{name}' is no weight segment; names start with {_PREFIX}-")
        fd = os.open(SHM_DIR / name, os.O_RDWR)
        try:
            return cls(name, mmap.mmap(fd, os.fstat(fd).st_size), lock=None)
        finally:
            os.close(fd)

    @property
    def num_bytes(self) -> int:
        """Capacity."""
        return len(self.memory)

    def unlink(self) -> None:
        """Remove the name, if it is ours; who has mapped the memory keeps it. A second call does nothing."""
        if self._lock is not None:
            (SHM_DIR / self.name).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def close(self) -> None:
        """Unlink and unmap."""
        self.unlink()
        with contextlib.suppress(BufferError):  # a tensor still looks at it: the mapping goes with the last view
            self.memory.close()


def remove_stale_segments() -> list[str]:
    """Remove segments whose maker is dead, of whatever run, and return their names."""
    removed = []
    for path in SHM_DIR.glob(f"{_PREFIX}-*"):
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError:
            continue  # gone meanwhile, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except BlockingIOError:
            continue
        finally:
            os.close(fd)
    return removed


def _free_bytes() -> int:
    info = os.statvfs(SHM_DIR)
    return info.f_bavail * info.f_frsize


def _check_room(size: int) -> None:
    free = _free_bytes()
    if size > free:
        raise _no_room(size, free)


def _no_room(size: int, free: int) -> ResourceError:
    return ResourceError(
        f"Weight sync needs {size / 2**20:.1f} MiB of shared memory in {SHM_DIR} and {free / 2**20:.1f} MiB are free. "
        "Lower --update-weight-buffer-size, free space there, or give the container more (docker run --shm-size=...)."
    )
