"""The ledger: only legal moves, nothing half written, and exactly the commit's history after a resume."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vime.errors import CheckpointError, DataError, ResourceError
from vime.rollout.ledger import ENDS, MOVES, Entry, Ledger, Mark, Outcome, State


def open_ledger(folder: Path, mark: Mark | None = None) -> Ledger:
    """The ledger in `folder`."""
    return Ledger(folder / "ledger.sqlite", mark=mark, data={})


def issue(ledger: Ledger, *groups: int) -> None:
    """Issue fresh groups of one sample."""
    ledger.record([Entry(group=group, state=State.ISSUED, samples=[group]) for group in groups])


def train(ledger: Ledger, group: int, step: int) -> None:
    """Train on a group."""
    ledger.record([Entry(group=group, state=State.TRAINED, step=step, outcomes=[Outcome(sample=group, state=State.TRAINED)])])


def rows(folder: Path, query: str) -> list[Any]:
    """What another connection reads."""
    db = sqlite3.connect(folder / "ledger.sqlite")
    try:
        return db.execute(query).fetchall()
    finally:
        db.close()


def test_every_state_has_its_moves_and_an_end_is_an_end() -> None:
    assert set(MOVES) == {None, *State} - {State.TRUNCATED}  # which is a sample's alone
    assert all(not MOVES[state] for state in ENDS - {State.DROPPED})
    assert MOVES[State.DROPPED] == {State.TRAINED, State.KEPT}


@pytest.mark.parametrize("seed", range(20))
def test_a_random_walk_keeps_to_the_moves_and_is_what_another_reader_sees(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    ledger = open_ledger(tmp_path)
    model: dict[int, State] = {}
    for _ in range(150):
        group, state = random_.randrange(12), random_.choice([state for state in State if state is not State.TRUNCATED])
        if state in MOVES[model.get(group)]:
            ledger.record([Entry(group=group, state=state)])
            model[group] = state
        else:
            with pytest.raises(DataError, match=f"group {group} "):
                ledger.record([Entry(group=group, state=state)])
    assert {group: ledger.state(group) for group in model} == model
    assert ledger.live == {group: state for group, state in model.items() if state not in ENDS}
    last = "SELECT grp, state FROM (SELECT grp, state, max(seq) FROM events GROUP BY grp)"
    assert dict(rows(tmp_path, last)) == model
    ledger.close()


def test_one_wrong_move_keeps_all_of_its_entries_out(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    issue(ledger, 1)
    with pytest.raises(DataError, match="group 7 is to be trained, but it was never issued"):
        ledger.record([Entry(group=1, state=State.TRAINED, step=0), Entry(group=7, state=State.TRAINED, step=0)])
    assert ledger.live == {1: State.ISSUED}
    issue(ledger, 2)
    assert [seq for (seq,) in rows(tmp_path, "SELECT seq FROM events")] == [1, 2]


def test_what_is_trained_twice_is_refused_naming_both_steps(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    issue(ledger, 1)
    train(ledger, 1, step=3)
    with pytest.raises(DataError, match=r"group 1 was trained at step 3 and is to be trained again at step 5.*group_index of None"):
        train(ledger, 1, step=5)
    with pytest.raises(DataError, match="gave out group 1 again, which is trained at step 3"):
        issue(ledger, 1)


def test_a_resume_undoes_what_the_commit_does_not_contain(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    issue(ledger, 0, 1, 2)
    train(ledger, 0, step=0)
    train(ledger, 1, step=1)  # handed out ahead of the commit of step 0
    mark = ledger.mark(0)
    train(ledger, 2, step=2)
    issue(ledger, 3)
    ledger.close()  # or a kill: what is recorded is in the file
    again = open_ledger(tmp_path, mark)
    assert {group: again.state(group) for group in range(4)} == {0: State.TRAINED, 1: State.ISSUED, 2: State.ISSUED, 3: None}
    assert again.live == {1: State.ISSUED, 2: State.ISSUED}
    train(again, 1, step=1)
    issue(again, 3)
    assert rows(tmp_path, "SELECT life, step, seq FROM lives") == [(1, -1, 0), (2, 0, mark.seq)]
    assert rows(tmp_path, "SELECT grp, state FROM events WHERE undone_by = 2 ORDER BY seq") == [
        (1, "trained"),
        (2, "trained"),
        (3, "issued"),
    ]


READER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1])
print(db.execute("SELECT count(*) FROM events").fetchone()[0])
db.close()
"""


def test_a_reader_of_another_process_that_comes_after_a_mark_takes_nothing_away(tmp_path: Path) -> None:
    def read() -> str:  # a process of its own, as `sqlite3 run/ledger.sqlite` is: locks are those of processes
        command = [sys.executable, "-c", READER, str(tmp_path / "ledger.sqlite")]
        return subprocess.run(command, timeout=60, check=True, capture_output=True, text=True).stdout.strip()

    ledger = open_ledger(tmp_path)
    issue(ledger, 0)
    ledger.mark(-1)
    assert read() == "1"
    issue(ledger, 1)
    assert read() == "2"
    mark = ledger.mark(-1)
    train(ledger, 1, step=0)
    ledger.close()
    again = open_ledger(tmp_path, mark)
    assert again.live == {0: State.ISSUED, 1: State.ISSUED}
    train(again, 1, step=0)
    assert read() == "4"


def test_a_log_that_somebody_removed_ends_the_commit(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    issue(ledger, 0)
    (tmp_path / "ledger.sqlite-wal").unlink()
    with pytest.raises(ResourceError, match=r"could not be synced to disk: .*ledger\.sqlite-wal"):
        ledger.mark(0)


def test_a_second_resume_from_the_same_commit_undoes_the_first(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    issue(ledger, 0)
    mark = ledger.mark(-1)
    for _ in range(3):
        again = open_ledger(tmp_path, mark)
        train(again, 0, step=0)
        again.close()
    assert rows(tmp_path, "SELECT undone_by FROM events WHERE state = 'trained'") == [(3,), (4,), (None,)]


def test_a_run_that_begins_anew_keeps_nothing(tmp_path: Path) -> None:
    issue(open_ledger(tmp_path), 0)
    issue(open_ledger(tmp_path), 0)
    assert len(rows(tmp_path, "SELECT * FROM events")) == 1


def test_a_lost_ledger_goes_on_at_the_commit_and_says_what_is_missing(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    issue(ledger, 0, 1)
    mark = ledger.mark(4)
    ledger.close()
    (tmp_path / "ledger.sqlite").unlink()
    again = open_ledger(tmp_path, mark)
    issue(again, 2)
    assert rows(tmp_path, "SELECT seq FROM events") == [(3,)]
    assert rows(tmp_path, "SELECT value FROM about WHERE name = 'lost'") == [(f'{{"ledger": "{mark.ledger}", "seq": 2, "step": 4}}',)]


def test_a_foreign_a_torn_and_another_runs_ledger_are_refused(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    issue(ledger, 0)
    mark = ledger.mark(0)
    ledger.close()
    with pytest.raises(CheckpointError, match="torn: it ends at entry 1, and the commit of step 0 stands at 9"):
        open_ledger(tmp_path, Mark(ledger=mark.ledger, seq=9, step=0))
    with pytest.raises(CheckpointError, match="the ledger of another run"):
        open_ledger(tmp_path, Mark(ledger="other", seq=1, step=0))
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(CheckpointError, match="torn, or no ledger"):
        open_ledger(tmp_path, mark)
    path.unlink()
    sqlite3.connect(path).execute("CREATE TABLE theirs (x)")
    with pytest.raises(CheckpointError, match="no ledger of vime's"):
        open_ledger(tmp_path, mark)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((ResourceError, OSError), match="file"):
        open_ledger(tmp_path / "file")


def test_a_full_disk_is_told_and_nothing_is_half_written(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    issue(ledger, 0)
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own error for a full disk
    with pytest.raises(ResourceError, match=r"ledger\.sqlite cannot be written: database or disk is full"):
        ledger.record([Entry(group=number, state=State.ISSUED, samples=list(range(900))) for number in range(1, 60)])
    assert ledger.live == {0: State.ISSUED}
    ledger._db.execute("PRAGMA max_page_count = 100000")
    issue(ledger, 1)
    assert rows(tmp_path, "SELECT seq, grp FROM events") == [(1, 0), (2, 1)]


def test_counts_are_those_since_the_last_call(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    issue(ledger, 0, 1)
    train(ledger, 0, step=0)
    events = {"ledger/issued_groups": 2.0, "ledger/trained_groups": 1.0, "ledger/trained_samples": 1.0}
    assert ledger.counts() == events | {"ledger/kept": 0.0, "ledger/in_flight": 1.0}
    assert ledger.counts() == {"ledger/kept": 0.0, "ledger/in_flight": 1.0}
