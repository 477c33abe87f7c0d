"""Where a run starts: from its own commit, from another run's, or from weights that `vime convert` wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

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
