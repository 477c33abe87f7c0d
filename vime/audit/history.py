"""A ledger, read: the history that survives, group by group, and names for what a finding is about."""

from __future__ import annotations

import contextlib
import itertools
import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.errors import CheckpointError
from vime.rollout.ledger import APPLICATION, ENDS, FORMAT, LEDGER_FILE, Mark, State

__all__ = ["Event", "Finding", "GroupHistory", "History", "open_history"]

BUSY_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    kind: str  # a few words: "trained twice"
    text: str  # the whole sentence, with names
    group: int | None = None
    samples: tuple[int, ...] = ()
    place: str | None = None  # file:line of the prompt

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One move of a group, with how its samples ended: (sample, segment, state)."""

    seq: int
    state: State
    step: int | None
    reason: str | None
    samples: tuple[int, ...] | None
    ends: tuple[tuple[int | None, int, State], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHistory:
    """The moves of one group that survive, in order."""

    group: int
    events: tuple[Event, ...]

    @property
    def state(self) -> State:
        """Where it stands."""
        return self.events[-1].state

    @property
    def issued(self) -> tuple[int, ...]:
        """The samples that it was issued with."""
        return next((event.samples for event in self.events if event.samples is not None), ())


class History:
    """A ledger, open for reading."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self.db, self.path = db, path
        about = dict(db.execute("SELECT name, value FROM about"))
        self.ledger: str = about["id"]
        self.lost = Mark(**json.loads(about["lost"])) if "lost" in about else None  # what was before it is not known
        self.lives: list[tuple[int, str, int, int]] = db.execute("SELECT life, begun, step, seq FROM lives ORDER BY life").fetchall()
        query = "SELECT max(coalesce((SELECT max(seq) FROM draws), 0), coalesce((SELECT max(seq) FROM events), 0))"
        self.last_seq: int = db.execute(query).fetchone()[0]
        told = [json.loads(data) for (data,) in db.execute("SELECT data FROM lives ORDER BY life")]
        self.data: dict[str, Any] = told[-1] if told else {}
        self.log_dirs: list[str | None] = [data.get("log_dir") for data in told]  # of each life

    def groups(self) -> Iterator[GroupHistory]:
        """All groups, by id."""
        query = """
            SELECT e.grp, e.seq, e.state, e.step, e.reason, e.samples, o.sample, o.segment, o.state
            FROM events e LEFT JOIN outcomes o ON o.seq = e.seq WHERE e.undone_by IS NULL ORDER BY e.grp, e.seq
        """
        for group, rows in itertools.groupby(self.db.execute(query), key=lambda row: row[0]):
            events = []
            for (seq, state, step, reason, samples), ends in itertools.groupby(rows, key=lambda row: row[1:6]):
                events.append(
                    Event(
                        seq=seq,
                        state=State(state),
                        step=step,
                        reason=reason,
                        samples=None if samples is None else tuple(json.loads(samples)),
                        ends=tuple((sample, segment, State(end)) for *_, sample, segment, end in ends if end is not None),
                    )
                )
            yield GroupHistory(group=group, events=tuple(events))

    def live_at(self, mark: Mark) -> dict[int, State]:
        """The groups that had not ended when the commit of `mark` was made."""
        last = """
            SELECT grp, state, max(seq) FROM events
            WHERE undone_by IS NULL AND seq <= ? AND NOT (state = 'trained' AND step > ?) GROUP BY grp
        """
        query = f"SELECT grp, state FROM ({last}) WHERE state IN ('issued', 'kept')"
        return {group: State(state) for group, state in self.db.execute(query, (mark.seq, mark.step))}

    def ended(self, group: int, seq: int) -> bool:
        """Whether a group had ended at entry `seq`; one that the user's code put into the buffer may never have been issued."""
        query = "SELECT state FROM events WHERE grp = ? AND seq <= ? AND undone_by IS NULL ORDER BY seq DESC LIMIT 1"
        row = self.db.execute(query, (group, seq)).fetchone()
        return row is not None and State(row[0]) in ENDS

    def life_of(self, step: int) -> int | None:
        """Number in `lives` of the start whose training of `step` stands: the last that went on before it."""
        return next((number for number, life in reversed(list(enumerate(self.lives))) if life[2] < step), None)

    def place(self, group: int) -> str | None:
        """file:line of a group's prompt."""
        query = (
            "SELECT path, line, unit FROM draws JOIN files USING (file) WHERE grp = ? AND undone_by IS NULL ORDER BY draws.seq DESC LIMIT 1"
        )
        row = self.db.execute(query, (group,)).fetchone()
        return None if row is None else place_name(*row)

    def finding(self, kind: str, group: int, what: str, samples: Sequence[int] = ()) -> Finding:
        """A finding about a group, which it names with its prompt and samples."""
        place = self.place(group)
        about = ", ".join(filter(None, [place, ranges(samples, "sample")]))
        text = f"group {group}{f' ({about})' if about else ''} {what}"
        return Finding(kind=kind, text=text, group=group, samples=tuple(samples), place=place)


def place_name(path: str, line: int, unit: str) -> str:
    """A row, as editors understand it; of a table its number."""
    return f"{path}:{line}" if unit == "line" else f"{path} {unit} {line}"


def ranges(numbers: Sequence[int], noun: str) -> str:
    """ "samples 3-5, 9"; empty for none."""
    parts = []
    for _, run in itertools.groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0]):
        first, *rest = [number for _, number in run]
        parts.append(f"{first}-{rest[-1]}" if rest else f"{first}")
    shown = ", ".join(parts[:8]) + (", ..." if len(parts) > 8 else "")
    return f"{noun}{'s' * (len(set(numbers)) > 1)} {shown}" if parts else ""


@contextlib.contextmanager
def open_history(folder: Path) -> Iterator[History]:
    """The ledger of a run's folder, also while the run goes on and after it was killed; nothing is written.

    Raises:
        CheckpointError: there is none, it is torn, foreign or of another version.
    """
    path = folder / LEDGER_FILE
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder. Give the run's --save folder (of a run without --save: its --log-dir).")
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no {LEDGER_FILE}, so there is nothing to audit. Give the run's --save folder (of a run without --save: its "
            "--log-dir)."
        )
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS)) as db:
            if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
                raise CheckpointError(f"{path} is no ledger of vime's, or its head is torn. Name another run's folder.")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version != FORMAT:
                raise CheckpointError(f"{path} has the format {version}, and this version of vime reads {FORMAT}. Use that which wrote it.")
            (said,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if said != "ok":
                raise CheckpointError(f"{path} is torn ({' '.join(said.split())[:200]}). Restore it from a copy.")
            db.execute("BEGIN")  # one moment of a run that goes on
            yield History(db, path)
    except (sqlite3.Error, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is torn, or cannot be read ({error}). Restore it from a copy.") from error
