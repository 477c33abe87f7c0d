"""Data sources: ids, epochs, give-back, and going on exactly after a save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.rollout.support import make_args
from vime.errors import CheckpointError, DataError
from vime.rollout.data_source import DataSource, RolloutDataSource, RolloutDataSourceWithBuffer
from vime.utils.types import Sample


@pytest.fixture
def args(model_dir: Path, tmp_path: Path) -> Any:
    """Five prompts in groups of two."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"input": f"p{n}", "label": n, "metadata": {"n": n}}) + "\n" for n in range(5)))
    return make_args(hf_checkpoint=str(model_dir), prompt_data=str(file), label_key="label", n_samples_per_prompt=2, rollout_shuffle=True)


def prompts_of(groups: list[Any]) -> list[Any]:
    """The prompt of each group."""
    return [group[0].prompt for group in groups]


def test_it_is_a_data_source(args: Any) -> None:
    assert isinstance(RolloutDataSourceWithBuffer(args), DataSource)


def test_groups_carry_ids_that_never_repeat(args: Any) -> None:
    source = RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(3) + source.get_samples(4)
    assert [group[0].group_index for group in groups] == list(range(7))
    assert [sample.index for group in groups for sample in group] == list(range(14))
    assert all(group[0].group_index == group[1].group_index for group in groups)


def test_members_do_not_share_state(args: Any) -> None:
    first, second = RolloutDataSource(args).get_samples(1)[0]
    first.metadata["touched"] = True
    assert "touched" not in second.metadata


def test_one_request_may_run_through_several_epochs_each_in_its_own_order(args: Any) -> None:
    groups = RolloutDataSource(args).get_samples(15)
    epochs = [prompts_of(groups[start : start + 5]) for start in (0, 5, 10)]
    assert all(sorted(epoch) == ["p0", "p1", "p2", "p3", "p4"] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_without_shuffling_the_files_order_is_kept(model_dir: Path, args: Any) -> None:
    plain = make_args(hf_checkpoint=str(model_dir), prompt_data=args.prompt_data, n_samples_per_prompt=1)
    assert prompts_of(RolloutDataSource(plain).get_samples(7)) == ["p0", "p1", "p2", "p3", "p4", "p0", "p1"]


def test_given_back_groups_come_first_and_in_order(args: Any) -> None:
    source = RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(3)
    source.add_samples(groups[1:])
    assert source.get_buffer_length() == 2
    again = source.get_samples(3)
    assert [group[0].group_index for group in again] == [1, 2, 3]


def test_a_group_of_the_wrong_size_is_not_taken_back(args: Any) -> None:
    with pytest.raises(DataError, match="n_samples_per_prompt = 2"):
        RolloutDataSourceWithBuffer(args).add_samples([[Sample()]])


def test_a_source_without_a_buffer_refuses_groups(args: Any) -> None:
    with pytest.raises(DataError, match="RolloutDataSourceWithBuffer"):
        RolloutDataSource(args).add_samples([[Sample(), Sample()]])


@pytest.mark.parametrize("taken", [0, 3, 5, 11])
def test_a_loaded_source_goes_on_exactly(args: Any, tmp_path: Path, taken: int) -> None:
    source = RolloutDataSourceWithBuffer(args)
    source.get_samples(taken)
    path = str(tmp_path / "deep" / "data_source.json")
    source.save(path)
    loaded = RolloutDataSourceWithBuffer(args)
    loaded.load(path)
    assert loaded.get_samples(9) == source.get_samples(9)


def test_the_buffer_survives_a_save_with_every_field(args: Any, tmp_path: Path) -> None:
    source = RolloutDataSourceWithBuffer(args)
    (group,) = source.get_samples(1)
    group[0].append_response_tokens(tokens=[1, 2], log_probs=[-0.1, -1 / 3], weight_versions=["1", "2"], status=Sample.Status.COMPLETED)
    group[0].reward = float(np.float32(0.1))
    group[1].metadata["nested"] = {"list": [1, None, {"x": 2.5}]}
    fanned = [group[0], [group[1], group[1]]]
    source.add_samples([fanned])
    path = str(tmp_path / "data_source.json")
    source.save(path)
    loaded = RolloutDataSourceWithBuffer(args)
    loaded.load(path)
    assert loaded.buffer == [fanned]


def test_what_json_cannot_give_back_is_refused_naming_it(args: Any, tmp_path: Path) -> None:
    source = RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(2)
    source.add_samples(groups[:1])
    groups[0][0].metadata["image"] = b"raw"
    with pytest.raises(DataError, match=r"sample 0\.metadata\.image cannot be saved: a bytes"):
        source.save(str(tmp_path / "state.json"))
    groups[0][0].metadata["image"] = {1: "integer key"}
    with pytest.raises(DataError, match="key 1 is no string"):
        source.save(str(tmp_path / "state.json"))
    assert list(tmp_path.glob("state.json")) == []


def test_a_missing_a_torn_and_a_foreign_state_are_refused(args: Any, tmp_path: Path) -> None:
    source = RolloutDataSourceWithBuffer(args)
    with pytest.raises(CheckpointError, match="no saved data source"):
        source.load(str(tmp_path / "none.json"))
    path = tmp_path / "state.json"
    source.save(str(path))
    path.write_text(path.read_text()[:40])
    with pytest.raises(CheckpointError, match="torn"):
        source.load(str(path))
    path.write_text("{}")
    with pytest.raises(CheckpointError, match="not a data source"):
        source.load(str(path))


def test_a_state_of_other_prompts_is_refused(args: Any, model_dir: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "state.json")
    RolloutDataSourceWithBuffer(args).save(path)
    other = make_args(hf_checkpoint=str(model_dir), prompt_data=f"{args.prompt_data}@[0:4]", n_samples_per_prompt=2)
    with pytest.raises(DataError, match="saved with 5 prompts"):
        RolloutDataSourceWithBuffer(other).load(path)


def test_without_prompt_data_groups_hold_empty_samples(model_dir: Path) -> None:
    source = RolloutDataSource(make_args(hf_checkpoint=str(model_dir), n_samples_per_prompt=2))
    assert len(source) == 0
    assert [[sample.prompt for sample in group] for group in source.get_samples(2)] == [["", ""], ["", ""]]


def test_dropped_prompts_are_counted_and_said(model_dir: Path, args: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text('{"input": "short"}\n{"input": "much longer than that"}\n')
    source = RolloutDataSource(make_args(hf_checkpoint=str(model_dir), prompt_data=str(file), rollout_max_prompt_len=8))
    assert len(source) == 1
    assert source.metrics() == {"rollout/epoch": 0.0, "rollout/dropped_prompts": 1.0, "rollout/bad_rows": 0.0}
    assert "1 of 2 prompts are longer" in caplog.text
