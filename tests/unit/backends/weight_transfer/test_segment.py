"""Shared-memory segments: layout, room, and what is left of a dead maker."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from vime.backends.weight_transfer import segment as module
from vime.backends.weight_transfer.segment import ALIGNMENT, SHM_DIR, Segment, layout, remove_stale_segments
from vime.errors import ResourceError


def test_tensors_lie_aligned_and_apart() -> None:
    specs, size = layout([("a", "float32", (3,), 12), ("b", "bfloat16", (65,), 130), ("c", "float32", (1,), 4)])
    assert [spec.offset for spec in specs] == [0, ALIGNMENT, ALIGNMENT * 4]
    assert size == ALIGNMENT * 5
    assert specs[1].to_wire() == {"name": "b", "dtype": "bfloat16", "shape": [65], "offset": 64, "num_bytes": 130}


def test_what_one_side_writes_the_other_reads_even_after_the_name_is_gone() -> None:
    mine = Segment.create("unit", 100)
    theirs = Segment.attach(mine.name)
    mine.unlink()
    mine.memory[:5] = b"hello"
    assert theirs.memory[:5] == b"hello"
    assert not (SHM_DIR / mine.name).exists()
    theirs.close()
    mine.close()


def test_only_weight_segments_are_attached() -> None:
    with pytest.raises(ValueError, match="is no weight segment"):
        Segment.attach("../../etc/passwd")


def test_too_little_room_is_told_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_free_bytes", lambda: 2**20)
    with pytest.raises(
        ResourceError, match=r"needs 2\.0 MiB of shared memory in /dev/shm and 1\.0 MiB are free.*--update-weight-buffer-size"
    ):
        Segment.create("unit", 2 * 2**20)
    assert not list(SHM_DIR.glob("vime-weights-unit-*"))


def test_a_file_system_that_fills_up_meanwhile_is_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", full)
    with pytest.raises(ResourceError, match="of shared memory"):
        Segment.create("unit", 100)
    assert not list(SHM_DIR.glob("vime-weights-unit-*"))


def test_a_dead_makers_segment_is_removed_and_a_living_ones_stays() -> None:
    code = "import os; from vime.backends.weight_transfer.segment import Segment; print(Segment.create('unit', 100).name, flush=True)"
    dead = subprocess.run(
        [sys.executable, "-c", code + "; os.kill(os.getpid(), 9)"], capture_output=True, text=True, timeout=60
    ).stdout.strip()
    living = Segment.create("unit", 100)
    assert (SHM_DIR / dead).exists()
    removed = remove_stale_segments()
    assert dead in removed
    assert living.name not in removed
    assert not (SHM_DIR / dead).exists()
    assert (SHM_DIR / living.name).exists()
    living.close()
    assert not (SHM_DIR / living.name).exists()
