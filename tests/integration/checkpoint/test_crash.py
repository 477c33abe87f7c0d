"""A process that dies anywhere in a commit leaves a whole one: the one before, or the new one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.checkpoint.crashing import save
from vime.checkpoint import latest_commit

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

HERE = Path(__file__).parent


def test_a_death_at_any_touch_of_the_disk_leaves_one_whole_commit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "crashing.py"), str(tmp_path)], capture_output=True, text=True, check=True, timeout=100
    )
    deaths = int(done.stdout)
    assert deaths >= 20  # files, folders, renames and removals of one commit
    found = []
    for number in range(1, deaths + 1):
        folder = tmp_path / f"{number:03d}"
        commit = latest_commit(folder)
        assert commit is not None
        step = commit.rollout_id
        assert (commit.trainer / "at_once").read_text() == f"state {step}"
        assert (commit.trainer / "later").read_text() == f"more of {step}"
        assert (commit.rollout / "cursor").read_text() == f"cursor {step}"
        found.append(step)
        save(folder, step + 1)  # the run that resumes saves in turn
        assert latest_commit(folder).rollout_id == step + 1
        assert sorted(p.name for p in folder.glob("iter_*")) == [f"iter_{step + 1:07d}"]
    assert found == sorted(found)  # first always the old one, then always the new one
    assert {0, 1} == set(found)
