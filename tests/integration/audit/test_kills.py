"""A run is killed at 50 random points, resumed and audited each time: no prompt is lost, and none is trained twice.

What the ledger and the audit say is held against the batches themselves, which the run recorded (--save-debug-rollout-data).
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.audit.killed_run import FAILING, FANNED, FILTERED
from tests.rules.source import ROOT
from tests.unit.rollout.support import make_tokenizer
from vime.audit.report import audit
from vime.rollout.recorded import load_groups

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

SEED = 20261130
KILLS = {0: 30, 2: 20}  # --max-weight-staleness: kills
NUMBERS = range(1, 30)  # the prompts; with them in the file: a row that is too long, and one that is broken


Killed = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=KILLS, ids=["in turns", "ahead"])
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """(folder of the run, its lives)."""
    staleness = request.param
    folder = tmp_path_factory.mktemp("killed")
    (folder / "model").mkdir()
    make_tokenizer(folder / "model")
    rows = [json.dumps({"input": f"n{number}"}) for number in NUMBERS]
    rows.insert(4, json.dumps({"input": "much too long"}))
    rows.insert(9, '{"input": "n9')
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    command = [sys.executable, "-m", "tests.integration.audit.killed_run", str(folder), *map(str, (KILLS[staleness], SEED, staleness))]
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, timeout=600, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads((folder / "lives.json").read_text())["lives"]


def groups_of(folder: Path) -> list[tuple[int, int, int]]:
    """(step, group, prompt's number) of each group that was trained, as the recorded batches have it."""
    found = []
    for path in sorted((folder / "batches").glob("*.jsonl"), key=lambda path: int(path.stem)):
        for group in load_groups(str(path), int(path.stem)):
            first = group[0][0] if isinstance(group[0], list) else group[0]
            assert first.group_index is not None
            found.append((int(path.stem), first.group_index, int(str(first.prompt)[1:])))
    return found


def test_every_kill_hit_and_every_audit_is_clean(killed: Killed) -> None:
    _, lives = killed
    assert [life["code"] for life in lives] == [-9] * (len(lives) - 1) + [0], [life for life in lives if life["error"]]
    assert len(lives) - 1 in KILLS.values()
    assert [life["findings"] for life in lives if life["findings"]] == []
    assert lives[-1]["last_step"] > 15  # the run came on between the kills


def test_each_prompt_was_trained_exactly_once_in_each_epoch(killed: Killed) -> None:
    folder, lives = killed
    trained = groups_of(folder)
    assert trained[-1][0] == lives[-1]["last_step"]
    numbers = {group: number for _, group, number in trained}
    assert len(numbers) == len(trained)  # no group twice
    order = list(NUMBERS)
    assert all(number == order[group % len(order)] for group, number in numbers.items())
    never = {
        group for group in range(max(numbers)) if order[group % len(order)] % FILTERED == 0 or order[group % len(order)] % FAILING == 0
    }
    assert not never & numbers.keys()
    commit = max((folder / "run").glob("iter_*")) / "rollout"
    saved = json.loads((commit / "data_source.json").read_text())["buffer"] + json.loads((commit / "ledger.json").read_text())["in_flight"]
    waiting = {(group[0][0] if isinstance(group[0], list) else group[0])["group_index"] for group in saved}
    assert set(numbers) | never | waiting >= set(range(max(numbers)))  # no group lost
    assert not waiting & numbers.keys()
    assert max(numbers) > 2 * len(order)  # epochs


def test_the_ledger_says_what_the_batches_say(killed: Killed) -> None:
    folder, _ = killed
    db = sqlite3.connect(folder / "run" / "ledger.sqlite")
    said = db.execute("SELECT step, grp FROM events WHERE undone_by IS NULL AND state = 'trained' ORDER BY step, grp").fetchall()
    assert said == sorted((step, group) for step, group, _ in groups_of(folder))
    left_out = dict(db.execute("SELECT reason, count(DISTINCT line) FROM draws WHERE reason IS NOT NULL GROUP BY reason"))
    assert left_out == {"too long": 1, "malformed": 1}
    segments = db.execute("SELECT max(segment) FROM outcomes").fetchone()[0]
    assert segments == 1  # fan-outs
    assert {number % FANNED for number in NUMBERS} == set(range(FANNED))


def test_a_sample_that_is_lost_or_trained_twice_in_that_ledger_is_found(killed: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    folder, _ = killed
    last = "SELECT max(seq) FROM events WHERE state = 'trained' AND undone_by IS NULL"
    undone = "SELECT max(seq) FROM events WHERE state = 'trained' AND undone_by IS NOT NULL"
    for name, statement, kind in (
        ("lost", f"DELETE FROM outcomes WHERE segment = 0 AND seq = ({last})", "lost"),
        ("twice", f"UPDATE events SET undone_by = NULL WHERE seq = ({undone})", "trained twice"),  # as if the resume had undone nothing
    ):
        shutil.copytree(folder / "run", tmp_path / name)
        assert audit(tmp_path / name).clean
        db = sqlite3.connect(tmp_path / name / "ledger.sqlite")
        assert db.execute(statement).rowcount > 0
        db.commit()
        db.close()
        assert kind in {finding.kind for finding in audit(tmp_path / name).findings}
