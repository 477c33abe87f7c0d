"""Exports: whole or as before, and a full disk is said at the end of the collectives, not in their middle."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.limits import small_files
from vime.backends.megatron_utils.convert.writer import HFExport
from vime.errors import CheckpointError, ResourceError

LIMIT = 10_000


def source_in(folder: Path) -> Path:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    return folder / "model"


def test_an_export_holds_tensors_and_small_files(tmp_path: Path) -> None:
    export = HFExport(source_in(tmp_path), tmp_path / "hf", ())
    export.take([("a", torch.arange(3.0))])
    export.take([("b", torch.ones(2, 2))])
    assert export.finish() is None
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(found["a"], torch.arange(3.0))
    assert set(found) == {"a", "b"}
    assert (tmp_path / "hf" / "config.json").is_file()


def test_a_full_disk_is_told_at_the_end_and_leaves_what_was_there(tmp_path: Path) -> None:
    source = source_in(tmp_path)
    first = HFExport(source, tmp_path / "hf", ())
    first.take([("a", torch.zeros(3))])
    assert first.finish() is None
    with small_files(LIMIT):
        export = HFExport(source, tmp_path / "hf", ())
        export.take([("a", torch.ones(LIMIT))])
        export.take([("b", torch.ones(LIMIT))])
        failure = export.finish()
    assert isinstance(failure, ResourceError)
    assert "could not be written" in str(failure)
    assert "File too large" in str(failure)
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["a"], torch.zeros(3))
    assert not list((tmp_path / "hf").glob("*.part"))


def test_a_place_that_cannot_be_a_folder_is_told_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    export = HFExport(source_in(tmp_path), tmp_path / "file", ())
    export.take([("a", torch.zeros(3))])
    assert isinstance(export.finish(), ResourceError)


def test_a_carried_tensor_whose_folder_is_gone_is_told_at_the_end(tmp_path: Path) -> None:
    export = HFExport(tmp_path / "gone", tmp_path / "hf", ("mtp.",))
    export.take([("a", torch.zeros(3))])
    assert isinstance(export.finish(), CheckpointError)
    assert not list((tmp_path / "hf").glob("*.safetensors"))
