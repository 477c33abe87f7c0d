"""A disk that is full, without one: the size of this process's files is limited, and the write call itself fails (EFBIG)."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

__all__ = ["small_files"]


@contextlib.contextmanager
def small_files(limit: int) -> Iterator[None]:
    """No file of this process grows beyond `limit` bytes inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
