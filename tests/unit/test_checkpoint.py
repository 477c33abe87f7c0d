"""Commits are all or nothing."""

import json
from pathlib import Path

import pytest

from tests.limits import small_files
from vime.checkpoint import LATEST, begin_commit, latest_commit
from vime.errors import CheckpointError, ResourceError


def write(folder, step, *, keep=2, text="state"):
    def save(path):
        Path(path, "w").write_text(f"{text}{step}")

    return begin_commit(folder, step, weight_version=step + 1, keep=keep, writers={"trainer": save}).finish()


class Background:
    """A part that is written when `finish` waits for it, and not before."""

    def __init__(self, error=None):
        self.path, self.error, self.written = None, error, False

    def __call__(self, path):
        self.path = Path(path)
        return self

    def is_written(self):
        return self.written

    def finish(self):
        if self.error is not None:
            raise self.error
        (self.path / "w").write_text("late")


def begin(folder, step, part):
    return begin_commit(folder, step, weight_version=step + 1, keep=2, writers={"trainer": part})


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
        begin(tmp_path, 1, full)
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


def test_a_commit_in_the_background_is_none_before_it_is_complete(tmp_path):
    write(tmp_path, 0)
    part = Background()
    opened = begin(tmp_path, 1, part)
    assert not opened.is_written()
    assert latest_commit(tmp_path).rollout_id == 0
    part.written = True
    assert opened.is_written()
    assert latest_commit(tmp_path).rollout_id == 0
    assert opened.finish() == latest_commit(tmp_path)
    assert (latest_commit(tmp_path).trainer / "w").read_text() == "late"


@pytest.mark.parametrize(
    ("error", "raised"), [(OSError(28, "No space left on device"), ResourceError), (CheckpointError("x"), CheckpointError)]
)
def test_a_failure_in_the_background_leaves_the_earlier_commit(tmp_path, error, raised):
    write(tmp_path, 0)
    opened = begin(tmp_path, 1, Background(error))
    with pytest.raises(raised):
        opened.finish()
    assert latest_commit(tmp_path).rollout_id == 0
    assert not list(tmp_path.glob("*.tmp"))
    write(tmp_path, 1)
    assert latest_commit(tmp_path).rollout_id == 1


def test_a_part_that_wrote_nothing_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="the trainer wrote nothing into"):
        begin(tmp_path, 0, lambda _path: None).finish()
    assert latest_commit(tmp_path) is None


def test_an_old_commit_that_cannot_be_removed_is_no_failure_and_no_commit_any_more(tmp_path, monkeypatch, caplog):
    write(tmp_path, 0)
    write(tmp_path, 1)

    def busy(path, **_how):
        if path.name.endswith(".old.tmp"):
            raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("shutil.rmtree", busy)
    assert write(tmp_path, 2).rollout_id == 2
    assert "iter_0000000 could not be removed" in caplog.text
    assert not (tmp_path / "iter_0000000").exists()
    assert latest_commit(tmp_path).rollout_id == 2
    monkeypatch.undo()
    write(tmp_path, 3)
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000002", "iter_0000003"]


def test_files_that_a_full_disk_refuses_leave_the_earlier_commit_and_nothing_half_written(tmp_path):
    write(tmp_path, 0, text="small")
    with small_files(10_000), pytest.raises(ResourceError, match=r"File too large.*Earlier commits are intact. Free space"):
        write(tmp_path, 1, text="x" * 20_000)
    assert [p.name for p in tmp_path.glob("iter_*")] == ["iter_0000000"]
    assert latest_commit(tmp_path).rollout_id == 0
