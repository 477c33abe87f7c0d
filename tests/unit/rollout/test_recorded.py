"""Recorded rollouts: what is read equals what was written; a missing or torn file says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.limits import small_files
from tests.unit.rollout.support import make_args
from vime.errors import DataError, ResourceError
from vime.rollout.recorded import generate_rollout, load_groups, save_groups
from vime.utils.types import Sample


def groups() -> list[Any]:
    """Two groups; one member of the second is a fan-out of two segments."""
    made = [Sample(index=i, group_index=i // 2, prompt=f"p{i}", label=i, metadata={"n": [i, None]}) for i in range(4)]
    for one in made:
        one.append_response_tokens(tokens=[1, 2], log_probs=[-0.1, -1 / 3], kept=[[1], [2, 3]], weight_versions=["4", "4"], text="ab")
        one.reward, one.status = 0.1, Sample.Status.COMPLETED
    made[3].reward = {"score": 1.5, "why": "é"}
    return [made[:2], [made[2], [made[3], made[3]]]]


@pytest.fixture
def template(tmp_path: Path) -> str:
    return str(tmp_path / "deep" / "step_{rollout_id}.jsonl")


def test_what_is_read_equals_what_was_written(template: str) -> None:
    path = save_groups(template, 3, groups())
    assert path.name == "step_3.jsonl"
    assert load_groups(template, 3) == groups()


@pytest.mark.parametrize(("share", "count"), [(1.0, 2), (0.5, 1), (0.01, 1)])
def test_a_share_takes_the_first_groups(template: str, share: float, count: int) -> None:
    save_groups(template, 0, groups())
    assert load_groups(template, 0, share) == groups()[:count]


def test_the_rollout_function_gives_the_step_that_is_asked_for(template: str) -> None:
    save_groups(template, 7, groups())
    output = generate_rollout(make_args(load_debug_rollout_data=template), 7, None)
    assert output.samples == groups()
    with pytest.raises(DataError, match=r"there is no recorded step 8.*--save-debug-rollout-data.*lower --num-rollout"):
        generate_rollout(make_args(load_debug_rollout_data=template), 8, None)


@pytest.mark.parametrize("text", ["", "{}", '{"format": 1, "groups": 2}\n[]', "no json", '{"format": 9, "groups": 0}'])
def test_a_file_that_is_no_whole_recording_is_refused(template: str, text: str) -> None:
    path = save_groups(template, 0, groups())
    path.write_text(text)
    with pytest.raises(DataError, match="Record the step again"):
        load_groups(template, 0)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"cannot be written to .*file/0 .*--save-debug-rollout-data"):
        save_groups(str(tmp_path / "file" / "{rollout_id}"), 0, groups())


def test_a_full_disk_leaves_no_half_of_a_recording(tmp_path: Path) -> None:
    with small_files(100), pytest.raises(ResourceError, match=r"cannot be written to .* \(File too large\)"):
        save_groups(str(tmp_path / "{rollout_id}"), 0, groups())
    assert list(tmp_path.iterdir()) == []
