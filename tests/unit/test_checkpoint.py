"""Commits are all or nothing."""

import json

import pytest

from vime.checkpoint import LATEST, latest_commit, write_commit
from vime.errors import CheckpointError, ResourceError


def write(folder, step, *, keep=2, text="state"):
    from pathlib import Path

    return write_commit(
        folder, step, weight_version=step + 1, keep=keep, writers={"trainer": lambda path: Path(path, "w").write_text(f"{text}{step}")}
    )


def test_a_commit_is_found_again(tmp_path):
    write(tmp_path, 3)
    commit = latest_commit(tmp_path)
    assert (commit.rollout_id, commit.weight_version) == (3, 4)
    assert (commit.trainer / "w").read_text() == "state3"


def test_an_empty_folder_has_no_commit(tmp_path):
    assert latest_commit(tmp_path) is None


def test_only_the_newest_are_kept(tmp_path):
    for step in range(4):
        write(tmp_path, step)
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000002", "iter_0000003"]


def test_a_writer_that_fails_leaves_the_earlier_commit(tmp_path):
    write(tmp_path, 0)

    def full(path):
        raise OSError(28, "No space left on device")

    with pytest.raises(ResourceError, match="Earlier commits are intact"):
        write_commit(tmp_path, 1, weight_version=2, keep=2, writers={"trainer": full})
    assert latest_commit(tmp_path).rollout_id == 0
    assert not list(tmp_path.glob("*.tmp"))


def test_a_half_written_commit_is_never_loaded(tmp_path):
    write(tmp_path, 0)
    (tmp_path / "iter_0000001.tmp" / "trainer").mkdir(parents=True)
    assert latest_commit(tmp_path).rollout_id == 0


@pytest.mark.parametrize("harm", ["truncate", "remove", "record"])
def test_a_torn_commit_is_refused_with_the_way_back(tmp_path, harm):
    write(tmp_path, 0)
    commit = write(tmp_path, 1)
    if harm == "truncate":
        (commit.trainer / "w").write_text("")
    elif harm == "remove":
        (commit.trainer / "w").unlink()
    else:
        (commit.path / "commit.json").write_text("{")
    with pytest.raises(CheckpointError, match="iter_0000000"):
        latest_commit(tmp_path)


def test_going_back_gives_up_the_later_commits(tmp_path):
    for step in range(3):
        write(tmp_path, step, keep=3)
    (tmp_path / LATEST).write_text("iter_0000000")
    write(tmp_path, 1, keep=1, text="again")
    assert [p.name for p in tmp_path.glob("iter_*")] == ["iter_0000001"]
    assert (latest_commit(tmp_path).trainer / "w").read_text() == "again1"


def test_a_commit_that_cannot_fit_is_refused_before_it_is_begun(tmp_path):
    commit = write(tmp_path, 0)
    record = json.loads((commit.path / "commit.json").read_text())
    record["files"]["trainer/w"] = 10**18
    (commit.path / "commit.json").write_text(json.dumps(record))
    with pytest.raises(ResourceError, match="MB free"):
        write(tmp_path, 1)
