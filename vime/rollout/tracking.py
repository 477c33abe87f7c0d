"""The data source as rollout functions see it: what is taken, given back, dropped and trained is entered in the ledger.

data source ─get_samples▶ issued ─▶ trained (the manager) │ filtered, failed, stale (the rollout function)
     ▲                       │
     └──── add_samples ──────┘ kept

A copy of each group that is out stands by. A commit holds those that have not been trained by its step, whoever has them at that
moment: a run that resumes hands them out first. So nothing is lost in a rollout function of the user's own, either.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vime.data.prompts import fresh_copy
from vime.data.stream import Draw
from vime.errors import CheckpointError
from vime.hooks import user_errors
from vime.rollout.base_types import Group
from vime.rollout.buffer import kind_of
from vime.rollout.data_source import member_from_plain, member_to_plain
from vime.rollout.ledger import LEDGER_FILE, Entry, Ledger, Mark, Outcome, State
from vime.utils.types import Sample

__all__ = ["DATA_SOURCE_FILE", "MARK_FILE", "TrackedSource", "end_group", "give_back", "group_id", "outcomes_of", "read_mark"]

logger = logging.getLogger(__name__)

DATA_SOURCE_FILE = "data_source.json"  # in a commit's folder: the data source's own state
MARK_FILE = "ledger.json"  # beside it: the place in the ledger, and the groups that were out
FORMAT = 1  # of MARK_FILE
OVERDUE_STEPS = 8  # a group that a rollout function has kept for so many steps counts as dropped
MADE = "made by the rollout function"
NOT_RETURNED = "not returned by the rollout function"


@dataclass(slots=True)
class _Out:
    """A group that is out."""

    taken_at: int  # the step
    like: Group  # as it was handed out; of a fresh group whose members differ in nothing but the index: the first member
    indices: Sequence[int] | None  # those of the members, where `like` is but the first
    trained_at: int | None = None  # the step that it was handed to the trainer for

    def group(self) -> Group:
        """The group as it was handed out."""
        if self.indices is None:
            return self.like
        out: Group = []
        for index in self.indices:
            first = self.like[0]
            assert isinstance(first, Sample)
            member = fresh_copy(first)
            member.index = index
            out.append(member)
        return out


class TrackedSource:
    """A data source with its ledger. Everything that is not of its own is the data source's. Safe in any thread.

    Args:
        inner: the data source, as --data-source-path makes it.
        path: --data-source-path, for errors.
        run_dir: folder of the ledger.
        log_dir: that of metrics.jsonl, for the audit.
        load: a commit's folder of `save` to go on from; None begins anew.
        steps_ahead: steps that a group may be generated ahead.

    Raises:
        CheckpointError: what `load` holds, or the ledger, is missing, torn or of another run.
    """

    def __init__(self, inner: Any, path: str, *, run_dir: Path, log_dir: Path, load: Path | None, steps_ahead: int = 0) -> None:
        self._inner, self._path = inner, path
        self._overdue = OVERDUE_STEPS + steps_ahead
        self._lock = threading.RLock()
        self._out: dict[int, _Out] = {}
        self._returning: list[Group] = []
        self._draws: list[tuple[Draw, int | None]] = []
        self._step = 0
        self._given_up: list[tuple[Sequence[Group], State, str]] = []
        if hasattr(inner, "observer"):
            inner.observer = self
        mark: Mark | None = None
        in_flight: list[Group] = []
        if load is not None:
            with self._errors():
                inner.load(str(load / DATA_SOURCE_FILE))
            mark, in_flight = read_mark(load / MARK_FILE)
        file = run_dir / LEDGER_FILE
        if mark is not None and not file.exists():
            logger.warning("%s is not there: the ledger begins anew at the commit of step %d, without what was before.", file, mark.step)
        with self._errors():
            data = inner.describe() if hasattr(inner, "describe") else {}
        self.ledger = Ledger(file, mark=mark, data={"source": path, "log_dir": str(log_dir.absolute()), **data})
        self._take_in(in_flight, mark)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def get_samples(self, num_samples: int) -> list[Group]:
        """Groups to generate, entered as issued: those that were out at the commit that was loaded, then the data source's."""
        with self._lock:
            again = self._returning[:num_samples]
            fresh: list[Group] = []
            if len(again) < num_samples:
                with self._errors():
                    fresh = list(self._inner.get_samples(num_samples - len(again)))
            self._returning = self._returning[num_samples:]
            groups = again + fresh
            entries = self._take_given_up()
            for group in groups:
                indices = _indices(group)
                if indices is not None:
                    number = group_id(group)
                    known = self.ledger.state(number)
                    reason = None if known is None else f"again, {kind_of(group).name.lower()}"
                    entries.append(Entry(group=number, state=State.ISSUED, reason=reason, samples=None if known else indices))
                    self._out[number] = _hold(group, indices, self._step)
            draws, self._draws = self._draws, []
            self.ledger.record(entries, draws)
            return groups

    def add_samples(self, samples: list[Group], reason: str | None = None) -> None:
        """Give groups back, entered as kept: whole, partial or as they were; `reason` says why, where that does not."""
        with self._lock:
            numbers = [group_id(group) if _is_group(group) else None for group in samples]
            known = [(number, group) for number, group in zip(numbers, samples, strict=True) if self._may_come(number)]
            with self._errors():
                self._inner.add_samples(samples)
            entries = [Entry(group=int(n or 0), state=State.KEPT, reason=reason or kind_of(group).name.lower()) for n, group in known]
            self.ledger.record(entries + self._take_given_up())
            for number, _ in known:
                self._out.pop(int(number or 0), None)

    def end_group(self, group: Group, state: State, reason: str) -> None:
        """A group that is out ends without being trained on: filtered, failed, stale or dropped."""
        with self._lock:
            number = group_id(group)
            if number in self._out:
                ends = outcomes_of(_flat(group), self.ledger.samples(number), state, reason)
                self.ledger.record([Entry(group=number, state=state, reason=reason, outcomes=ends)])
                del self._out[number]

    def trained(self, samples: Sequence[Sample], step: int) -> None:
        """The samples that were handed to the trainer for `step`.

        Raises:
            DataError: one of them was trained before.
        """
        with self._lock:
            groups: dict[int | None, list[Sample]] = defaultdict(list)
            for sample in samples:
                groups[sample.group_index].append(sample)
            entries: list[Entry] = []
            for number, members in groups.items():
                if number is None or self.ledger.state(number) is None:
                    made = self.ledger.new_id()
                    issued = sorted({sample.index for sample in members if sample.index is not None})
                    entries.append(Entry(group=made, state=State.ISSUED, reason=MADE, samples=issued))
                    entries.append(_training(made, members, issued, step))
                else:
                    entries.append(_training(number, members, self.ledger.samples(number), step))
                    if number in self._out:
                        self._out[number].trained_at = step
            self.ledger.record(entries)

    def begin_step(self, step: int, *, trained_through: int) -> None:
        """Step `step` is generated from now on; steps up to `trained_through` are trained, so their groups need no copy."""
        with self._lock:
            self._step = step
            if hasattr(self._inner, "rollout_id"):
                self._inner.rollout_id = step
            self._settle(trained_through)
            overdue = [n for n, out in self._out.items() if out.trained_at is None and out.taken_at + self._overdue < step]
            for number in overdue:
                self.end_group(self._out[number].group(), State.DROPPED, f"{NOT_RETURNED} within {self._overdue} steps")

    def save(self, folder: str, step: int) -> None:
        """Write the data's part of the commit of `step` into `folder`."""
        with self._lock:
            self._settle(step)
            with self._errors():
                self._inner.save(str(Path(folder) / DATA_SOURCE_FILE))
            out = sorted([*self._returning, *(out.group() for out in self._out.values())], key=group_id)
            in_flight = [[member_to_plain(member) for member in group] for group in out]
            state = {"format": FORMAT, "mark": asdict(self.ledger.mark(step)), "in_flight": in_flight}
        with (Path(folder) / MARK_FILE).open("w", encoding="utf-8") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> dict[str, float]:
        """The data source's own, and what the ledger has counted since the last call."""
        own: dict[str, float] = {}
        if hasattr(self._inner, "metrics"):
            with self._errors():
                own = dict(self._inner.metrics())
        return own | self.ledger.counts()

    def close(self) -> None:
        """Close the ledger, and what the data source holds."""
        self.ledger.close()
        if hasattr(self._inner, "close"):
            self._inner.close()

    def drawn(self, draws: Iterable[Draw], group: int) -> None:
        """From the data source: the rows that were drawn for a fresh group, its own the last."""
        *left_out, own = draws
        self._draws += [(draw, None) for draw in left_out]
        self._draws.append((own, group))

    def gave_up(self, groups: Sequence[Group], state: State, reason: str) -> None:
        """From the data source, while it is asked for groups or given some: groups that its buffer does not keep any more."""
        self._given_up.append((groups, state, reason))

    def _may_come(self, number: int | None) -> bool:
        """Whether a group is out, or was given up for lost."""
        return number in self._out or (number is not None and self.ledger.state(number) is State.DROPPED)

    def _take_given_up(self) -> list[Entry]:
        entries = []
        for groups, state, reason in self._given_up:
            for group in groups:
                if issued := self.ledger.samples(group_id(group)):
                    ends = outcomes_of(_flat(group), issued, state, reason)
                    entries.append(Entry(group=group_id(group), state=state, reason=reason, outcomes=ends))
        self._given_up = []
        return entries

    def _take_in(self, in_flight: list[Group], mark: Mark | None) -> None:
        """What was out at the commit comes back, to be handed out first."""
        self._returning = in_flight
        numbers = [number for group in in_flight if (number := group_id(group)) is not None]
        out = [number for number in numbers if self.ledger.state(number) is State.ISSUED]
        step = -1 if mark is None else mark.step
        entries = [Entry(group=n, state=State.KEPT, reason=f"in flight at the commit of step {step}") for n in out]
        self.ledger.record(entries + self._take_given_up())

    def _settle(self, step: int) -> None:
        for number in [n for n, out in self._out.items() if out.trained_at is not None and out.trained_at <= step]:
            del self._out[number]

    def _errors(self) -> Any:
        return user_errors("--data-source-path", self._path, type(self._inner))


def end_group(source: Any, group: Group, state: State, reason: str) -> None:
    """`TrackedSource.end_group` where `source` is one; a rollout function may be called with a bare data source, too."""
    if isinstance(source, TrackedSource):
        source.end_group(group, state, reason)


def give_back(source: Any, groups: list[Group], reason: str | None = None) -> None:
    """`add_samples` of a data source, with the reason where it is a `TrackedSource`."""
    if isinstance(source, TrackedSource):
        source.add_samples(groups, reason)
    else:
        source.add_samples(groups)


def read_mark(path: Path) -> tuple[Mark, list[Group]]:
    """(place in the ledger, groups that were out) of a commit. Raises CheckpointError."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise CheckpointError(f"{path} has the format {state['format']}, and this version of vime reads {FORMAT}.")
        return Mark(**state["mark"]), [[member_from_plain(member) for member in group] for group in state["in_flight"]]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the commit has no place in a ledger. Load a commit of this version of vime.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is torn ({error}). Load an earlier commit.") from error


def outcomes_of(samples: Iterable[Sample], issued: Sequence[int], state: State, reason: str | None = None) -> list[Outcome]:
    """How each issued sample, and each segment that came of it, ended, when its group ends in `state`."""
    out, segments = [], dict.fromkeys(issued, 0)
    for sample in samples:
        parent = next((number for number in (sample.index, sample.rollout_id) if number in segments), None)
        segment = 0 if parent is None else segments[parent]
        if parent is not None:
            segments[parent] += 1
        ended, why = _end_of(sample, state, reason)
        versions = [int(version) for version in set(sample.weight_versions) if version.isdecimal()]
        out.append(
            Outcome(
                sample=parent,
                state=ended,
                segment=segment,
                own=None if sample.index == parent else sample.index,
                reason=why,
                oldest=min(versions, default=None),
                newest=max(versions, default=None),
            )
        )
    absent = (State.DROPPED, NOT_RETURNED) if state is State.TRAINED else (state, reason)
    out += [Outcome(sample=number, state=absent[0], reason=absent[1]) for number, count in segments.items() if not count]
    return out


def _end_of(sample: Sample, state: State, reason: str | None) -> tuple[State, str | None]:
    if sample.status is Sample.Status.FAILED:
        return State.FAILED, str(sample.metadata.get("failure", "its generate function set FAILED"))
    if state is State.TRAINED and sample.remove_sample:
        if sample.status is Sample.Status.TRUNCATED:
            return State.TRUNCATED, "reached the length limit, and taken out of the loss (remove_sample)"
        return State.FILTERED, "taken out of the loss (remove_sample)"
    return state, reason


def _training(group: int, members: Sequence[Sample], issued: Sequence[int], step: int) -> Entry:
    """The end of a group that came to the trainer; one of which no sample is trained was not."""
    ends = outcomes_of(members, issued, State.TRAINED)
    states = {end.state for end in ends}
    state = State.TRAINED if State.TRAINED in states else State.FAILED if State.FAILED in states else State.FILTERED
    reason = None if state is State.TRAINED else f"none of its samples is trained at step {step}"
    return Entry(group=group, state=state, step=step if state is State.TRAINED else None, reason=reason, outcomes=ends)


def _is_group(group: Any) -> bool:
    return isinstance(group, list) and bool(group) and isinstance(group[0], Sample | list) and group[0] != []


def group_id(group: Group) -> int:
    """The group_index of a group's samples."""
    first = group[0][0] if isinstance(group[0], list) else group[0]
    return first.group_index  # type: ignore[return-value]


def _flat(group: Group) -> list[Sample]:
    return [part for member in group for part in (member if isinstance(member, list) else [member])]


def _indices(group: Any) -> list[int] | None:
    """The members' sample indices; None for what has no ids, which cannot be followed."""
    if not _is_group(group) or group_id(group) is None:
        return None
    firsts = [member[0] if isinstance(member, list) else member for member in group]
    indices = [first.index for first in firsts]
    return None if None in indices else indices  # type: ignore[return-value]


def _hold(group: Group, indices: Sequence[int], step: int) -> _Out:
    """A copy of a group that is handed out."""
    members = [member for member in group if isinstance(member, Sample)]
    first = members[0].__dict__ if members else {}
    alike = len(members) == len(group) and all({**m.__dict__, "index": None} == {**first, "index": None} for m in members[1:])
    if alike:
        return _Out(taken_at=step, like=[fresh_copy(members[0])], indices=indices)
    copies: Group = [[fresh_copy(part) for part in member] if isinstance(member, list) else fresh_copy(member) for member in group]
    return _Out(taken_at=step, like=copies, indices=None)
