"""The buffer: one order whatever came when, a limit, and filters that take what they return."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from vime.errors import DataError
from vime.rollout.buffer import GroupBuffer, Kind, kind_of, pop_first
from vime.utils.types import Sample

Status = Sample.Status


def group(index: int, status: Status = Status.PENDING, versions: tuple[str, ...] = ()) -> Any:
    """A group of two: one as described, one fresh (or done, when that one is)."""
    first = Sample(group_index=index, index=2 * index, status=status, response_length=len(versions), weight_versions=list(versions))
    other = Status.PENDING if status in (Status.PENDING, Status.ABORTED) else Status.COMPLETED
    return [first, Sample(group_index=index, index=2 * index + 1, status=other)]


def indices(groups: list[Any]) -> list[int]:
    """group_index of each."""
    return [one[0].group_index for one in groups]


def test_a_group_is_finished_partial_or_fresh() -> None:
    assert kind_of(group(0)) is Kind.FRESH
    assert kind_of(group(0, Status.ABORTED, ("1",))) is Kind.PARTIAL
    assert kind_of([*group(0, Status.COMPLETED)[:1], Sample()]) is Kind.PARTIAL
    assert kind_of(group(0, Status.TRUNCATED, ("1",))) is Kind.FINISHED
    assert kind_of([[Sample(status=Status.COMPLETED), Sample(status=Status.FAILED)]]) is Kind.FINISHED


def test_the_order_follows_from_the_groups_not_from_when_they_came() -> None:
    groups = [
        group(1), group(2, Status.ABORTED, ("4", "5")), group(3, Status.ABORTED, ("3", "9")), group(4, Status.COMPLETED, ("7",)),
        group(5, Status.COMPLETED, ("7",)),
    ]  # fmt: skip
    for arrival in itertools.permutations(groups):
        buffer = GroupBuffer(limit=9, drop=None)
        for one in arrival:
            buffer.add([one])
        assert indices(buffer.groups) == [4, 5, 3, 2, 1]


def test_groups_without_an_index_keep_the_order_in_which_they_came() -> None:
    buffer = GroupBuffer(limit=9, drop=None)
    nameless = [[Sample(prompt=str(n))] for n in range(3)]
    buffer.add([*nameless, group(8)])
    assert buffer.groups == [group(8), *nameless]


def test_a_full_buffer_refuses_all_that_is_given_or_drops_what_comes_last() -> None:
    buffer = GroupBuffer(limit=2, drop=None)
    buffer.add([group(0)])
    with pytest.raises(DataError, match=r"holds 1 groups, and 2 more.*--buffer-max-groups is 2"):
        buffer.add([group(1), group(2)])
    assert indices(buffer.groups) == [0]
    dropped: list[Any] = []
    buffer = GroupBuffer(limit=2, drop=lambda groups, why: dropped.append((indices(groups), why)))
    buffer.add([group(3), group(1), group(2)])
    assert indices(buffer.groups) == [1, 2]
    assert dropped == [([3], "the buffer was full (--buffer-max-groups 2)")]


def test_a_filter_chooses_and_what_it_takes_out_beside_that_is_told() -> None:
    buffer = GroupBuffer(limit=9, drop=None)
    buffer.add([group(n) for n in range(5)])

    def every_second(groups: list[Any], num_samples: int) -> list[Any]:
        taken = groups[1::2][:num_samples]
        groups[:] = [one for one in groups if one[0].group_index == 4]
        return taken

    taken, removed = buffer.take(2, every_second)
    assert (indices(taken), indices(removed), indices(buffer.groups)) == ([1, 3], [0, 2], [4])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda groups, n: groups[:n],  # left in the list
        lambda groups, n: [groups[0], groups.pop(0)],  # twice
        lambda groups, n: [group(77)],  # never there
        lambda groups, n: groups.append(group(78)) or [],
    ],
)
def test_a_filter_that_does_not_take_what_it_returns_is_refused(wrong: Any) -> None:
    buffer = GroupBuffer(limit=9, drop=None)
    buffer.add([group(0), group(1)])
    with pytest.raises(DataError, match="--buffer-filter-path: it must take the groups that it returns out"):
        buffer.take(1, wrong)
    assert indices(buffer.groups) == [0, 1]


def test_the_default_filter_takes_the_first() -> None:
    groups = [group(n) for n in range(3)]
    assert indices(pop_first(None, None, groups, 2)) == [0, 1]
    assert indices(groups) == [2]
