"""A capsule's folder: what is read equals what was written; torn, foreign and missing ones are refused with what to do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vime.capsule.folder import capsule_path, finish_capsule, partial_path, read_capsule, write_prompts
from vime.capsule.results import Item, ParameterRows, SampleRows, in_order, items_of_samples, save_items
from vime.errors import DataError
from vime.types import TrainSample


def sample(number: int, tokens: list[int]) -> SampleRows:
    plain = TrainSample(
        tokens=np.array(tokens), response_length=1, loss_mask=np.ones(1, np.float32), reward=0.0, raw_reward=0.0, sample_id=number,
        group_id=0, rollout_id=number, rollout_mask_sum=1.0,
    )  # fmt: skip
    rows = {("tokenize", "tokens"): torch.tensor(tokens), ("advantage", "reward"): torch.tensor([0.25 * number])}
    return SampleRows(sample=plain, origin=(0, number), rows=rows)


def items() -> list[Item]:
    rows = ParameterRows()
    rows.add("w", torch.arange(10_000.0))
    nothing = Item(stage="loss", name="metrics", step=0, labels=(), rows=())
    samples = in_order([sample(2, [5, 6, 7]), sample(1, [9, 8])])
    return [*items_of_samples(samples, {("tokenize", "tokens")}, ()), rows.item("update", "weights", step=0), nothing]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    partial = partial_path(tmp_path, 3)
    (partial / "state").mkdir(parents=True)
    (partial / "state" / "part").write_bytes(b"1234")
    (partial / "samples.jsonl").write_text("{}\n")
    write_prompts(partial, ["sample 1", "sample 2"], [[9], [5, 6]])
    save_items(partial, items())
    return finish_capsule(tmp_path, 3, {"state": {"path": "state", "resume": True}})


def test_what_is_read_equals_what_was_written(written: Path, tmp_path: Path) -> None:
    assert written == capsule_path(tmp_path, 3)
    assert not partial_path(tmp_path, 3).exists()
    facts, read = read_capsule(written)
    assert (facts["rollout_id"], facts["state"]["path"]) == (3, "state")
    assert [row.tolist() for row in read[0].rows] == [[9], [5, 6]]
    for found, meant in zip(read[1:], items(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found.rows, meant.rows, strict=True))
        for name in ("stage", "name", "step", "labels", "exact", "of_layout", "digests", "strides"):
            assert getattr(found, name) == getattr(meant, name)


def test_samples_are_in_an_order_that_no_layout_changes() -> None:
    rows = [sample(2, [1]), sample(1, [4]), sample(1, [3])]
    for order in ((0, 1, 2), (2, 1, 0)):
        found = items_of_samples(in_order(rows[i] for i in order), (), ())[0]
        assert found.labels == ("sample 1", "sample 1 (segment 2)", "sample 2")
        assert [row.tolist() for row in found.rows] == [[3], [4], [1]]


@pytest.mark.parametrize("name", ["results.safetensors", "samples.jsonl", "state/part", "prompts.json"])
def test_a_torn_capsule_names_the_file(written: Path, name: str) -> None:
    data = (written / name).read_bytes()
    (written / name).write_bytes(data[:-1])
    with pytest.raises(DataError, match=f"is torn: {name} has {len(data) - 1} bytes instead of {len(data)}"):
        read_capsule(written)
    (written / name).unlink()
    with pytest.raises(DataError, match=f"is torn: {name} is missing"):
        read_capsule(written)


def test_results_of_the_right_size_and_wrong_content_are_refused(written: Path) -> None:
    size = (written / "results.safetensors").stat().st_size
    (written / "results.safetensors").write_bytes(b"x" * size)
    with pytest.raises(DataError, match="cannot be read"):
        read_capsule(written)


def test_another_format_names_the_version_that_wrote_it(written: Path) -> None:
    facts = json.loads((written / "capsule.json").read_text())
    (written / "capsule.json").write_text(json.dumps(facts | {"format": 99, "vime": "9.9"}))
    with pytest.raises(DataError, match=r"has format 99.*vime 9\.9, which wrote it"):
        read_capsule(written)


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read"), ("[]", "is not what"), ("{}", "is not what")])
def test_a_foreign_file_is_refused(written: Path, text: str, message: str) -> None:
    (written / "capsule.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read_capsule(written)


def test_a_folder_that_is_no_capsule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no step capsule"):
        read_capsule(tmp_path / "nothing")
    unfinished = partial_path(tmp_path, 1)
    unfinished.mkdir()
    with pytest.raises(DataError, match="it was not finished"):
        read_capsule(unfinished)


def test_samples_that_were_not_written_keep_the_capsule_from_being_finished(tmp_path: Path) -> None:
    partial_path(tmp_path, 0).mkdir()
    with pytest.raises(DataError, match=r"samples\.jsonl .* was not written"):
        finish_capsule(tmp_path, 0, {})


def test_a_capsule_that_is_recorded_again_replaces_the_old_one(written: Path, tmp_path: Path) -> None:
    again = partial_path(tmp_path, 3)
    again.mkdir()
    for name in ("samples.jsonl", "prompts.json", "results.json", "results.safetensors"):
        (again / name).write_bytes((written / name).read_bytes())
    finish_capsule(tmp_path, 3, {"failure": "nan"})
    facts, _ = read_capsule(written)
    assert facts["failure"] == "nan"
    assert "state/part" not in facts["files"]
