"""What a save that failed is called: no space, or something else."""

from __future__ import annotations

import errno
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.checkpoint import CheckpointException

from vime.backends.megatron_utils import checkpoint
from vime.errors import CheckpointError, ResourceError

Usage = namedtuple("Usage", "total used free")
PLENTY = 10**12
NEEDED = 1000


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException, *, free: int) -> None:
    def write(*_args: Any, **_named: Any) -> None:
        raise error

    monkeypatch.setattr(checkpoint, "_write", write)
    monkeypatch.setattr(checkpoint, "_state_bytes", lambda _model: NEEDED)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(PLENTY, PLENTY - free, free))


def save(folder: Path) -> None:
    nothing: Any = SimpleNamespace()
    checkpoint.save_state(str(folder / "iter" / "trainer"), nothing, nothing, nothing, step=1)


def wrapped(inner: BaseException) -> RuntimeError:
    outer = RuntimeError("Worker failure")
    outer.__cause__ = inner
    return outer


def reported(inner: BaseException) -> CheckpointException:
    """As torch hands on what a rank reported."""
    return CheckpointException("write", {0: (inner, [])})


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "free"),
    [
        (NO_SPACE, PLENTY),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), PLENTY),
        (wrapped(NO_SPACE), PLENTY),
        (reported(wrapped(NO_SPACE)), PLENTY),
        (RuntimeError("write failed: No space left on device"), PLENTY),
        (reported(RuntimeError("Worker failure: <class 'RuntimeError'>")), NEEDED - 1),
        (RuntimeError("unexpected pos 704 vs 598"), NEEDED - 1),
    ],
)
def test_no_space_is_said_with_folder_and_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException, free: int) -> None:
    fail_with(monkeypatch, error, free=free)
    with pytest.raises(ResourceError, match=r"no space left on .*trainer.* free space and run the same command again; earlier commits"):
        save(tmp_path)


def test_another_failure_reported_by_a_rank_is_a_checkpoint_error_with_its_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fail_with(monkeypatch, reported(RuntimeError("a shard is missing")), free=PLENTY)
    with pytest.raises(CheckpointError, match=r"could not be written into .*a shard is missing"):
        save(tmp_path)


@pytest.mark.parametrize("error", [RuntimeError("gloo: Connection closed by peer"), PermissionError(errno.EACCES, "Permission denied")])
def test_other_errors_stay_what_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception) -> None:
    fail_with(monkeypatch, error, free=PLENTY)
    with pytest.raises(type(error)) as caught:
        save(tmp_path)
    assert caught.value is error
