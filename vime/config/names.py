"""Names that are like another: those one edit away, found through an index, else the nearest ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

__all__ = ["NameIndex"]


class NameIndex:
    """A set of names. An edit deletes, inserts or replaces a character, or swaps two neighbours.

    Two names are one edit apart only if deleting at most one character from each makes them equal: the index holds
    every name under all that is left of it after one deletion.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(dict.fromkeys(names))
        self._by_rest: dict[str, list[str]] = {}
        for name in self._names:
            for rest in {name, *_deletions(name)}:
                self._by_rest.setdefault(rest, []).append(name)

    def one_edit(self, name: str) -> list[str]:
        """The names at most one edit away from `name`, in their order."""
        found = {other for rest in (name, *_deletions(name)) for other in self._by_rest.get(rest, ())}
        return [other for other in self._names if other in found and _within_one(name, other)] if found else []

    def nearest(self, name: str, count: int = 3) -> list[str]:
        """All names one edit away; when there are none, the `count` most alike, best first."""
        return self.one_edit(name) or difflib.get_close_matches(name, self._names, n=count, cutoff=0.7)


def _deletions(name: str) -> Iterator[str]:
    for i in range(len(name)):
        yield name[:i] + name[i + 1 :]


def _within_one(a: str, b: str) -> bool:
    """Whether one edit, or none, makes `a` into `b`."""
    if len(a) > len(b):
        a, b = b, a
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    if len(a) < len(b):
        return a[start:] == b[start + 1 :]
    rest_a, rest_b = a[start:], b[start:]
    return rest_a[1:] == rest_b[1:] or (rest_a[:2] == rest_b[1::-1] and rest_a[2:] == rest_b[2:])
