"""Writing a state: what a disk says becomes the right error, and a copy in the background is the state of when it was taken."""

from __future__ import annotations

import gc
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import vime.backends.megatron_utils  # noqa: F401 - prepares Megatron

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest  # isort: skip
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from vime.backends.megatron_utils.state_writer import StateWriter
from vime.errors import CheckpointError, ResourceError

LARGE = 100_000  # numbers; more than a file keeps in its buffer


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def request(file: Path, tensor: torch.Tensor, finished: list[Any], completed: list[str]) -> AsyncRequest:
    """A plan that puts one object and one tensor into `file`."""
    objects = [(WriteItem(index=MetadataIndex("common"), type=WriteItemType.BYTE_IO), io.BytesIO(b"common"))]
    tensors = [(WriteItem(index=MetadataIndex("weight"), type=WriteItemType.SHARD), tensor)]
    writer = SimpleNamespace(
        write_buckets=[(str(file), file.name, (objects, tensors))],
        transforms=_StorageWriterTransforms(),
        finish=lambda metadata, results: finished.extend([metadata, results]),
    )
    return AsyncRequest(None, (writer, "the metadata"), [lambda: completed.append("metadata.json")])


def test_a_written_state_is_completed_with_where_everything_stands(tmp_path: Path) -> None:
    tensor, finished, completed = torch.arange(5.0), [], []
    saving = StateWriter(str(tmp_path), request(tmp_path / "0.distcp", tensor, finished, completed))
    saving.finish()
    metadata, ((common, weight),) = finished
    assert (metadata, completed) == ("the metadata", ["metadata.json"])
    data = (tmp_path / "0.distcp").read_bytes()
    assert data[: common.storage_data.length] == b"common"
    place = weight.storage_data
    assert torch.equal(torch.load(io.BytesIO(data[place.offset : place.offset + place.length])), tensor)


def test_what_is_written_in_the_background_is_the_state_of_when_it_was_taken(tmp_path: Path) -> None:
    gate = threading.Event()

    class Held(StateWriter):
        def _write(self) -> None:
            gate.wait(60)
            super()._write()

    tensor, finished = torch.arange(5.0), []
    saving = Held(str(tmp_path), request(tmp_path / "0.distcp", tensor, finished, []), held={tensor.untyped_storage().data_ptr()})
    tensor.fill_(-1.0)
    assert list(tmp_path.iterdir()) == []
    gate.set()
    saving.finish()
    place = finished[1][0][1].storage_data
    data = (tmp_path / "0.distcp").read_bytes()
    assert torch.equal(torch.load(io.BytesIO(data[place.offset : place.offset + place.length])), torch.arange(5.0))


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_no_space_and_nothing_is_completed(background: bool) -> None:
    completed: list[str] = []
    saving = StateWriter("run/iter", request(Path("/dev/full"), torch.zeros(LARGE), [], completed), held=() if background else None)
    with pytest.raises(ResourceError, match=r"no space left on run/iter for the trainer's state .*rank 0.* free space .* earlier commits"):
        saving.finish()
    gc.collect()  # a zip writer of torch over a file that raised would end the process here
    assert completed == []


def test_another_failure_of_the_disk_is_a_checkpoint_error_with_its_cause(tmp_path: Path) -> None:
    saving = StateWriter("run/iter", request(tmp_path / "missing" / "0", torch.zeros(3), [], []), held=())
    with pytest.raises(
        CheckpointError, match=r"could not be written into run/iter .*No such file or directory.*earlier commits are intact"
    ):
        saving.finish()


def test_metadata_that_cannot_be_written_is_an_error_of_the_save(tmp_path: Path) -> None:
    completed: list[str] = []
    planned = request(tmp_path / "0.distcp", torch.zeros(3), [], completed)

    def full(_metadata: Any, _results: Any) -> None:
        with Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"metadata")

    planned.async_fn_args[0].finish = full
    with pytest.raises(ResourceError, match="no space left"):
        StateWriter("run/iter", planned).finish()
    assert completed == []


def test_the_last_file_that_cannot_be_written_is_an_error_of_the_save(tmp_path: Path) -> None:
    planned = request(tmp_path / "0.distcp", torch.zeros(3), [], [])

    def full() -> None:
        with Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"metadata.json")

    planned.finalize_fns[:] = [full]
    with pytest.raises(ResourceError, match="no space left"):
        StateWriter("run/iter", planned).finish()


@pytest.mark.parametrize("background", [False, True])
def test_what_nobody_expected_is_an_error_of_the_save_too(tmp_path: Path, background: bool) -> None:
    storage = torch.zeros(1).untyped_storage
    broken: Any = SimpleNamespace(detach=lambda: torch.zeros(3, device="meta"), device=torch.device("cpu"), untyped_storage=storage)
    completed: list[str] = []
    saving = StateWriter("run/iter", request(tmp_path / "0", broken, [], completed), held=() if background else None)
    with pytest.raises(CheckpointError, match=r"could not be written into run/iter \(rank 0: NotImplementedError: "):
        saving.finish()
    assert completed == []
