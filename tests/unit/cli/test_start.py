"""Where a run starts: from its own commit, from another run's, or from weights that `vime convert` wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.checkpoint import begin_commit
from vime.cli.train import find_start
from vime.config import RunConfig
from vime.config.sections import CheckpointConfig
from vime.errors import CheckpointError


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
