"""The audit of one run: all checks, and what there is to say when nothing is wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vime.audit.checks import (
    check_commits,
    check_entries,
    check_group,
    check_metrics,
    check_rows,
    check_samples,
    find_metrics,
    read_commits,
)
from vime.audit.history import Finding, History, open_history
from vime.errors import CheckpointError
from vime.rollout.ledger import ENDS, State

__all__ = ["Report", "as_json", "as_text", "audit"]

SHOWN = 20  # findings that the text lists


@dataclass(slots=True, kw_only=True)
class Report:
    """What an audit found."""

    folder: str
    resumed_after: list[int]  # the step of the commit that each start but the first went on from; -1: before any commit
    last_step: int | None  # the last step that was trained
    committed_step: int | None  # that of the newest commit
    commits: int  # compared
    groups: dict[str, int]  # by state
    samples: dict[str, int]  # ended, by state
    left_out: dict[str, int]  # rows, by reason
    epochs: list[int]  # that each source is in
    undone: int  # groups of which a resume undid something
    issued_again: int  # of those: came again
    notes: list[str] = field(default_factory=list)  # what could not be compared
    findings: list[Finding] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings


def audit(folder: Path) -> Report:
    """Audit the run in `folder`. Raises CheckpointError when it cannot be audited."""
    torn: list[Finding] = []
    try:
        commits = read_commits(folder)  # before the ledger, which goes on in a run that does
    except CheckpointError as error:
        commits, torn = [], [Finding(kind="torn", text=str(error))]
    with open_history(folder) as history:
        committed = commits[-1].mark.step if commits else None
        report = _facts(history, folder, committed, len(commits))
        report.findings = [*torn, *check_entries(history)]
        groups: Counter[str] = Counter()
        samples: Counter[str] = Counter()
        for group in history.groups():
            report.findings += check_group(history, group)
            groups[str(group.state)] += 1
            if group.state in ENDS:
                samples.update(str(end) for _, _, end in group.events[-1].ends)
        report.groups, report.samples = dict(groups), dict(samples)
        report.findings += [*check_samples(history), *check_rows(history), *check_commits(history, commits)]
        files = find_metrics(history, folder)
        report.findings += check_metrics(history, files, committed)
        for lost in dict.fromkeys(file for file in files if not file.is_file()):
            report.notes.append(f"there is no {lost}, so the steps are not compared with it")
        return report


def _facts(history: History, folder: Path, committed: int | None, commits: int) -> Report:
    undone = "SELECT grp FROM events WHERE undone_by IS NOT NULL"
    again = f"SELECT count(DISTINCT grp) FROM events WHERE undone_by IS NULL AND state = 'issued' AND grp IN ({undone})"
    left_out = "SELECT reason, count(*) FROM draws WHERE undone_by IS NULL AND reason IS NOT NULL GROUP BY reason"
    epochs = "SELECT max(epoch) FROM draws WHERE undone_by IS NULL GROUP BY source ORDER BY source"
    notes = []
    if history.lost is not None:
        notes.append(f"the ledger was lost once: what was before the commit of step {history.lost.step} is not known")
    if history.data.get("prompts") is None:
        notes.append("the data source says nothing of its rows, so their order is not compared")
    if not commits:
        notes.append("there is no commit to compare with")

    def number(query: str) -> Any:
        return history.db.execute(query).fetchone()[0]

    return Report(
        folder=str(folder),
        resumed_after=[step for _, _, step, _ in history.lives[1:]],
        last_step=number("SELECT max(step) FROM events WHERE undone_by IS NULL AND state = 'trained'"),
        committed_step=committed,
        commits=commits,
        groups={},
        samples={},
        left_out=dict(history.db.execute(left_out)),
        epochs=[epoch for (epoch,) in history.db.execute(epochs)],
        undone=number(f"SELECT count(DISTINCT grp) FROM ({undone})"),
        issued_again=number(again),
        notes=notes,
    )


def as_json(report: Report) -> str:
    """For programs."""
    return json.dumps({"clean": report.clean, **asdict(report)}, indent=2)


def as_text(report: Report) -> str:
    """For people."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    count = len(report.findings)
    verdict = "nothing was lost or trained twice" if report.clean else f"{count} thing{'s' * (count > 1)} wrong"
    yield f"vime audit {report.folder}: {verdict}"
    for number, finding in enumerate(report.findings[:SHOWN], 1):
        yield f"  {number}. {finding}"
    if count > SHOWN:
        yield f"  ... and {count - SHOWN} more, which --json lists"
    through = "no step is trained" if report.last_step is None else f"trained through step {report.last_step}"
    commit = "no commit" if report.committed_step is None else f"{report.commits} commit{'s' * (report.commits > 1)}, "
    yield f"  {through}; {commit}{'' if report.committed_step is None else f'the newest of step {report.committed_step}'}"
    yield f"  prompts: {_counted(report.groups)}" + (f"; rows left out: {_counted(report.left_out)}" if report.left_out else "")
    yield f"  samples: {_counted(report.samples)}"
    if report.epochs:
        yield f"  epoch: {', '.join(map(str, report.epochs))}"
    if report.resumed_after:
        after = ", ".join("the beginning" if step < 0 else f"step {step}" for step in report.resumed_after)
        yield f"  resumed after {after}; {report.undone} prompts undone by that, {report.issued_again} of them issued again"
    if report.committed_step is not None and report.last_step is not None and report.last_step > report.committed_step:
        yield f"  what was trained after step {report.committed_step} is not in a commit yet: a resume issues it again"
    yield from (f"  {note}" for note in report.notes)


def _counted(counts: dict[str, int]) -> str:
    order = [str(state) for state in State]
    names = sorted(counts, key=lambda name: (order.index(name) if name in order else len(order), name))
    return ", ".join(f"{counts[name]} {name}" for name in names) or "none"
