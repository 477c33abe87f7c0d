"""Where a run starts: from its own commit, from another run's, or from weights that `vime convert` wrote; in folders of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from vime.checkpoint import begin_commit
from vime.cli.train import find_start, locked_folders, run_folder
from vime.config import RunConfig
from vime.config.sections import CheckpointConfig, LoggingConfig
from vime.errors import CheckpointError, ConfigError


def test_a_converted_checkpoint_starts_a_run_at_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text("{}")
    commit = find_start(RunConfig(checkpoint=CheckpointConfig(load=str(tmp_path))))
    assert commit is not None
    assert commit.trainer == tmp_path
    assert commit.rollout_id + 1 == 0


def test_a_folder_without_a_commit_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no commit\. Give the --save folder .* `vime convert --to megatron`"):
        find_start(RunConfig(checkpoint=CheckpointConfig(load=str(tmp_path))))


def commits(folder: Path, *steps: int) -> None:
    def write(path: str) -> None:
        Path(path, "w").write_text("state")

    for step in steps:
        begin_commit(folder, step, weight_version=step + 1, writers={"trainer": write}, keep=9).finish()


def test_the_commit_of_one_step_is_found(tmp_path: Path) -> None:
    commits(tmp_path, 1, 3, 5)
    commit = find_start(RunConfig(checkpoint=CheckpointConfig(load=str(tmp_path), ckpt_step=3)))
    assert commit is not None
    assert commit.rollout_id == 3


def test_a_step_without_a_commit_is_refused_with_those_there_are(tmp_path: Path) -> None:
    commits(tmp_path, 1, 3)
    with pytest.raises(CheckpointError, match=r"holds no commit of step 2; there are: 1, 3"):
        find_start(RunConfig(checkpoint=CheckpointConfig(load=str(tmp_path), ckpt_step=2)))


def test_ones_own_newest_commit_comes_before_another_runs(tmp_path: Path) -> None:
    commits(tmp_path / "other", 1, 3)
    commits(tmp_path / "own", 7)
    checkpoint = CheckpointConfig(load=str(tmp_path / "other"), ckpt_step=1, save=str(tmp_path / "own"))
    commit = find_start(RunConfig(checkpoint=checkpoint))
    assert commit is not None
    assert commit.rollout_id == 7


def folders(save: Path, log_dir: Path | None) -> RunConfig:
    return RunConfig(checkpoint=CheckpointConfig(save=str(save)), logging=LoggingConfig(log_dir=str(log_dir) if log_dir else None))


def held(config: RunConfig) -> AbstractContextManager[None]:
    return locked_folders(config, run_folder(config))


@pytest.mark.parametrize("log_dir", ["other", None])
def test_a_second_run_with_the_same_save_folder_is_refused_whatever_its_log_dir(tmp_path: Path, log_dir: str | None) -> None:
    first = folders(tmp_path / "save", tmp_path / "logs")
    second = folders(tmp_path / "save" / ".." / "save", tmp_path / log_dir if log_dir else None)
    said = r"the folder '.*/save' is in use by another run .* give another --save\."
    with held(first), pytest.raises(ConfigError, match=said), held(second):
        pass
    with held(second):  # the first has let go
        pass


def test_a_second_run_with_the_same_log_dir_is_refused_and_a_stranger_is_not(tmp_path: Path) -> None:
    first, stranger = folders(tmp_path / "save", tmp_path / "logs"), folders(tmp_path / "third", None)
    second = folders(tmp_path / "another", tmp_path / "logs")
    said = r"the folder '.*/logs' is in use by another run .* give another --log-dir\."
    with held(first), held(stranger), pytest.raises(ConfigError, match=said), held(second):
        pass
