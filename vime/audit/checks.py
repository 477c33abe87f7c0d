"""What must hold of a run's ledger, and of ledger, commits and metrics together. Each check yields what does not."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.audit.history import Event, Finding, GroupHistory, History, place_name, ranges
from vime.checkpoint import Commit, check_commit, latest_commit
from vime.data.stream import epoch_order
from vime.errors import CheckpointError
from vime.rollout.ledger import ENDS, MOVES, Mark, State
from vime.rollout.tracking import DATA_SOURCE_FILE, MARK_FILE, group_id, read_mark

__all__ = [
    "check_commits",
    "check_entries",
    "check_group",
    "check_metrics",
    "check_rows",
    "check_samples",
    "find_metrics",
    "read_commits",
]


def check_entries(history: History) -> Iterator[Finding]:
    """Entries are numbered without a gap: none was taken out."""
    first = 1 if history.lost is None else history.lost.seq + 1
    counted = "SELECT seq FROM draws UNION ALL SELECT seq FROM events"
    query = f"SELECT seq, before FROM (SELECT seq, lag(seq, 1, ?) OVER (ORDER BY seq) AS before FROM ({counted})) WHERE seq != before + 1"
    for seq, before in history.db.execute(query, (first - 1,)):
        yield Finding(kind="entries missing", text=f"between entry {before} and entry {seq} of {history.path}")


def check_group(history: History, group: GroupHistory) -> Iterator[Finding]:
    """A group moves only as it may, is trained once, and ends with each of its samples."""
    trained = [event.step for event in group.events if event.state is State.TRAINED]
    if len(trained) > 1:
        steps = " and ".join(str(step) for step in trained)
        yield history.finding("trained twice", group.group, f"was trained at steps {steps}", group.issued)
    before: State | None = None
    for event in group.events:
        again = event.state is State.TRAINED and before is State.TRAINED  # told above
        unknown = history.lost is not None and before is None  # its beginning is not in this ledger
        if event.state not in MOVES[before] and not again and not unknown:
            what = f"went from {before or 'nothing'} to {event.state} (entry {event.seq}), which cannot be"
            yield history.finding("impossible", group.group, what, group.issued)
        before = event.state
    if group.state in ENDS:
        yield from _check_ends(history, group, group.events[-1])


def _check_ends(history: History, group: GroupHistory, last: Event) -> Iterator[Finding]:
    ended = Counter((sample, segment) for sample, segment, _ in last.ends if sample is not None)
    if lost := [sample for sample in group.issued if (sample, 0) not in ended]:
        yield history.finding("lost", group.group, f"is {last.state}, but these of its samples have no end", lost)
    if strange := sorted({sample for sample, _ in ended} - set(group.issued)):
        yield history.finding("impossible", group.group, "ended with samples that it was not issued with", strange)


def check_samples(history: History) -> Iterator[Finding]:
    """No sample is trained twice, in whatever group."""
    query = """
        SELECT o.sample, group_concat(e.step, ' and '), min(e.grp), max(e.grp) FROM outcomes o JOIN events e ON e.seq = o.seq
        WHERE e.undone_by IS NULL AND e.grp >= 0 AND o.state = 'trained' AND o.sample IS NOT NULL
        GROUP BY o.sample, o.segment HAVING count(*) > 1 ORDER BY o.sample
    """
    for sample, steps, first, last in history.db.execute(query).fetchall():
        if first != last or len(set(steps.split(" and "))) == 1:  # several steps of one group: told of the group
            groups = f"group {first}" if first == last else f"groups {first} and {last}"
            place = history.place(first)
            at = "at steps" if " and " in steps else "at step"
            text = f"sample {sample} of {groups}{f' ({place})' if place else ''} was trained {at} {steps}"
            yield Finding(kind="trained twice", text=text, group=first, samples=(sample,), place=place)


def check_rows(history: History) -> Iterator[Finding]:
    """Each source's rows are drawn epoch by epoch in the order that the seed gives, none twice and none passed over, and each
    row that is drawn gives a group or the reason why not."""
    prompts = history.data.get("prompts")
    if prompts is None:
        return
    sources = prompts["sources"]
    at: list[tuple[int, int] | None] = [None if history.lost else (0, 0)] * len(sources)  # (epoch, position) of the next
    orders: dict[int, tuple[int, Any]] = {}
    query = """
        SELECT source, epoch, position, row, path, line, unit, grp, reason FROM draws JOIN files USING (file)
        WHERE undone_by IS NULL ORDER BY seq
    """
    for source, epoch, position, row, path, line, unit, group, reason in history.db.execute(query):
        place = place_name(path, line, unit)
        if orders.get(source, (None,))[0] != epoch:
            orders[source] = (epoch, epoch_order(sources[source]["rows"], prompts["shuffle_seed"], epoch))
        order = orders[source][1]
        due, found = at[source], (epoch, position)
        if due is not None and due[1] == len(order):
            due = (due[0] + 1, 0)
        if due is not None and found != due:
            ahead = found > due
            what = f"is drawn as number {position} of epoch {epoch} when number {due[1]} of epoch {due[0]} is due"
            yield Finding(kind="lost" if ahead else "drawn twice", text=f"{place} {what}", group=group, place=place)
        if not 0 <= position < len(order) or order[position] != row:
            yield Finding(kind="wrong order", text=f"{place} is not row {position} of epoch {epoch}", group=group, place=place)
        if (group is None) == (reason is None):
            yield Finding(kind="lost", text=f"{place} was drawn in epoch {epoch}, but gave no group, and no reason", place=place)
        at[source] = (epoch, position + 1)
    query = """
        SELECT grp FROM draws WHERE undone_by IS NULL AND grp IS NOT NULL
        EXCEPT SELECT grp FROM events WHERE undone_by IS NULL
    """
    for (group,) in history.db.execute(query).fetchall():
        yield history.finding("lost", group, "was drawn and never issued")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedData:
    """The data's part of one commit."""

    name: str  # of the commit's folder
    mark: Mark
    in_flight: list[int]  # groups that were out
    state: dict[str, Any] | None  # our own data source's; None of another one's

    @property
    def where(self) -> str:
        """How findings call it."""
        return f"the commit of step {self.mark.step} ({self.name})"


def read_commits(folder: Path) -> list[SavedData]:
    """The complete commits that the run's history has gone through, the newest last. Raises CheckpointError: one is torn."""
    latest = latest_commit(folder)
    if latest is None:
        return []
    names = sorted(path.name for path in folder.glob("iter_*") if (path / "commit.json").exists() and path.name < latest.path.name)
    found = []
    for name in names:
        try:
            found.append(_read_commit(check_commit(folder / name)))
        except CheckpointError:
            if (folder / name).exists():  # else the run has just removed it
                raise
    return [*found, _read_commit(latest)]


def _read_commit(commit: Commit) -> SavedData:
    mark, in_flight = read_mark(commit.rollout / MARK_FILE)
    try:
        state = json.loads((commit.rollout / DATA_SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        state = None
    ours = isinstance(state, dict) and {"format", "buffer", "prompts", "sample_group_index"} <= state.keys()
    groups = [group_id(group) for group in in_flight]
    return SavedData(name=commit.path.name, mark=mark, in_flight=groups, state=state if ours else None)


def check_commits(history: History, commits: Collection[SavedData]) -> Iterator[Finding]:
    """What a commit would hand out again is exactly what the ledger says has not ended; and it goes on at the right row."""
    for commit in commits:
        if commit.mark.ledger != history.ledger:
            yield Finding(kind="foreign", text=f"{commit.where} belongs to another ledger")
        elif history.last_seq < commit.mark.seq:
            what = f"{history.path} ends at entry {history.last_seq}, and {commit.where} stands at {commit.mark.seq}"
            yield Finding(kind="entries missing", text=what)
        elif history.lost is None or commit.mark.seq >= history.lost.seq:
            yield from _compare_live(history, commit)
            yield from _compare_places(history, commit)


def _compare_live(history: History, commit: SavedData) -> Iterator[Finding]:
    live = history.live_at(commit.mark)
    buffered = [] if commit.state is None else [_saved_id(group) for group in commit.state["buffer"]]
    counts = Counter(group for group in [*buffered, *commit.in_flight] if group is not None)
    for group, count in sorted(counts.items()):
        if count > 1:
            yield history.finding("to be trained twice", group, f"stands in {commit.where} {count} times")
        elif group not in live and history.ended(group, commit.mark.seq):
            yield history.finding("to be trained twice", group, f"has ended, but {commit.where} would hand it out again")
    for group, state in sorted(live.items()):
        if group not in counts and (commit.state is not None or state is State.ISSUED):
            what = f"is {state} and has not ended, but {commit.where} does not hold it"
            yield history.finding("lost", group, what, _samples(history, group))


def _saved_id(group: list[Any]) -> int | None:
    first = group[0][0] if isinstance(group[0], list) else group[0]
    found: int | None = first["group_index"]
    return found


def _samples(history: History, group: int) -> list[int]:
    query = "SELECT samples FROM events WHERE grp = ? AND samples IS NOT NULL AND undone_by IS NULL LIMIT 1"
    row = history.db.execute(query, (group,)).fetchone()
    return [] if row is None else list(json.loads(row[0]))


def _compare_places(history: History, commit: SavedData) -> Iterator[Finding]:
    """The cursor of each source stands behind the last row that was drawn."""
    if commit.state is None or commit.state["prompts"] is None:
        return
    for source, place in enumerate(commit.state["prompts"]["places"]):
        last = "SELECT epoch, position + 1 FROM draws WHERE undone_by IS NULL AND seq <= ? AND source = ? ORDER BY seq DESC LIMIT 1"
        drawn = history.db.execute(last, (commit.mark.seq, source)).fetchone() or (None if history.lost else (0, 0))
        if drawn is not None and drawn != (place["epoch"], place["offset"]):
            kind = "lost" if (place["epoch"], place["offset"]) > drawn else "to be trained twice"
            name = history.data["prompts"]["sources"][source]["name"]
            goes_on, due = f"row {place['offset']} of epoch {place['epoch']} of {name}", f"{drawn[1]} of epoch {drawn[0]}"
            yield Finding(kind=kind, text=f"{commit.where} goes on at {goes_on}, but {due} is due")
    query = "SELECT max(grp) + 1 FROM draws WHERE undone_by IS NULL AND seq <= ?"
    due = history.db.execute(query, (commit.mark.seq,)).fetchone()[0]
    if due is not None and due != commit.state["sample_group_index"]:
        what = f"{commit.where} gives its next group the id {commit.state['sample_group_index']}, but {due} is due"
        yield Finding(kind="impossible", text=what)


def find_metrics(history: History, folder: Path) -> list[Path]:
    """metrics.jsonl of each life, whether it is there or not: of the folder that the life named, or of the run's where it came along."""
    files = [Path(folder if named is None else named) / "metrics.jsonl" for named in history.log_dirs]
    here = folder / "metrics.jsonl"
    lives = {history.life_of(step) for step, _ in _logged_steps(here)} if here.is_file() else set()
    moved = {files[life] for life in lives if life is not None and not files[life].is_file()}
    return [here if file in moved else file for file in files]


def check_metrics(history: History, files: Sequence[Path], committed: int | None) -> Iterator[Finding]:
    """The steps of metrics.jsonl are those that the ledger trained, with as many samples.

    Args:
        files: that of each life; what is not there is not compared.
        committed: the newest commit's step.
    """
    logs = {path: dict(_logged_steps(path)) for path in dict.fromkeys(files) if path.is_file()}
    query = """
        SELECT e.step, count(*) FROM events e JOIN outcomes o ON o.seq = e.seq
        WHERE e.undone_by IS NULL AND e.state = 'trained' AND o.state = 'trained' GROUP BY e.step
    """
    trained = dict(history.db.execute(query))
    undone = {step for (step,) in history.db.execute("SELECT step FROM events WHERE undone_by IS NOT NULL AND state = 'trained'")}
    to_come = {step for step in undone - trained.keys() if committed is None or step > committed}  # their lines stay until they run again
    begins = -1 if history.lost is None else history.lost.step
    missing: dict[Path, list[int]] = defaultdict(list)

    def name(path: Path) -> str:
        return path.name if len(logs) == 1 else str(path)

    for step in sorted({*trained, *(step for steps in logs.values() for step in steps)}):
        life = history.life_of(step)
        path = None if life is None else files[life]  # what other folders hold of it, a resume undid
        if path is None or path not in logs or step in to_come:
            continue
        if step not in logs[path]:
            if step in trained and committed is not None and step <= committed:
                missing[path].append(step)
        elif step > begins and (count := logs[path][step]) is not None and trained.get(step, 0) != count:
            text = f"{name(path)} says that {count:g} samples were trained at step {step}, the ledger {trained.get(step, 0)}"
            yield Finding(kind="disagreement", text=text)
    for path, steps in missing.items():
        yield Finding(kind="disagreement", text=f"{name(path)} lacks {ranges(steps, 'step')}, which the ledger trained")


def _logged_steps(path: Path) -> Iterator[tuple[int, float | None]]:
    """(step, trained samples) of each finished step; a last line that a kill cut short is passed over.

    Raises:
        CheckpointError: a line before the last is no JSON.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line) if line else {}
        except ValueError as error:
            if number < len(lines):
                raise CheckpointError(f"{path}:{number} is no JSON ({error}). Mend or remove the line.") from error
            continue
        if record.get("source") == "step":
            yield int(record["step"]), record.get("ledger/trained_samples")
