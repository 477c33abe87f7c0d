"""The buffer: groups that were given back, finished, partial and fresh, in one bounded store with one order.

    1. finished   every member is done: the surplus of a step
    2. partial    some tokens are there, with their log-probs and weight versions; the rest is still to be generated
    3. fresh      nothing is generated yet

Within a kind the group with the oldest weight version comes first, then that with the lowest group_index, then that which came
first. The order follows from the groups alone, so a run that resumes has the same.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from vime.errors import DataError
from vime.rollout.base_types import Group
from vime.utils.types import Sample

__all__ = ["GroupBuffer", "Kind", "kind_of", "oldest_version", "pop_first"]

DONE = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED)


class Kind(enum.IntEnum):
    """How far a group is; the order in which the buffer serves them."""

    FINISHED = 0
    PARTIAL = 1
    FRESH = 2


def kind_of(group: Group) -> Kind:
    """How far a group is, told by its samples' status and tokens."""
    parts = [part for member in group for part in (member if isinstance(member, list) else [member])]
    if all(part.status in DONE for part in parts):
        return Kind.FINISHED
    return Kind.PARTIAL if any(part.response_length or part.status in DONE for part in parts) else Kind.FRESH


def oldest_version(group: Group) -> int | None:
    """The lowest weight version of a group's tokens; None when no token has one."""
    parts = [part for member in group for part in (member if isinstance(member, list) else [member])]
    return min((int(version) for part in parts for version in set(part.weight_versions) if version.isdecimal()), default=None)


def pop_first(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """The default of --buffer-filter-path: the first `num_samples` groups, taken out of `buffer`."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


class GroupBuffer:
    """Groups in the order of the module, `limit` at most.

    Args:
        limit: most groups. Beyond it `add` raises DataError, or with `drop` gives up those that would be served last.
        drop: called with what is given up, and why.
    """

    def __init__(self, *, limit: int, drop: Callable[[list[Group], str], None] | None) -> None:
        self._limit, self._drop = limit, drop
        self._groups: list[tuple[tuple[int, int, int, int], Group]] = []
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> list[Group]:
        """What is there, in order."""
        return [group for _, group in self._groups]

    def add(self, groups: Sequence[Group]) -> None:
        """Take groups in. Raises DataError when they are more than the limit allows; then none is taken."""
        if len(self._groups) + len(groups) > self._limit and self._drop is None:
            raise DataError(
                f"the buffer holds {len(self._groups)} groups, and {len(groups)} more were given back; --buffer-max-groups is "
                f"{self._limit}. More is given back than is taken: give back less, raise the limit, or let --buffer-overflow drop the last."
            )
        for group in groups:
            self._arrived += 1
            self._groups.append((self._key(group), group))
        self._groups.sort(key=lambda entry: entry[0])
        over = [group for _, group in self._groups[self._limit :]]
        del self._groups[self._limit :]
        if over and self._drop is not None:
            self._drop(over, f"the buffer was full (--buffer-max-groups {self._limit})")

    def take(self, num_samples: int, choose: Callable[[list[Group], int], list[Group]]) -> tuple[list[Group], list[Group]]:
        """(taken, removed): what `choose` takes out of the list of groups and returns, and what it takes out beside that.

        Raises:
            DataError: it returned what it left in the list, or what was not there.
        """
        rest = self.groups
        before = {id(group): entry for entry in self._groups for group in [entry[1]]}
        taken = choose(rest, num_samples)
        left, got = {id(group) for group in rest}, [id(group) for group in taken]
        if not left <= before.keys() or not set(got) <= before.keys() or left & set(got) or len(set(got)) < len(got):
            raise DataError(
                "--buffer-filter-path: it must take the groups that it returns out of `buffer`, once each, and add none "
                f"(of {len(before)} groups it returned {len(taken)} and left {len(rest)})."
            )
        self._groups = [entry for entry in self._groups if id(entry[1]) in left]
        removed = [group for key, (_, group) in before.items() if key not in left and key not in set(got)]
        return list(taken), removed

    def counts(self) -> dict[str, float]:
        """Groups by kind."""
        kinds = Counter(key[0] for key, _ in self._groups)
        return {f"buffer/{kind.name.lower()}_groups": float(kinds[kind]) for kind in Kind}

    def _key(self, group: Group) -> tuple[int, int, int, int]:
        version = oldest_version(group)
        first = group[0][0] if isinstance(group[0], list) else group[0]
        index = first.group_index
        return (kind_of(group), -1 if version is None else version, 1 << 62 if index is None else index, self._arrived)
