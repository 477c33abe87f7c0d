"""Spreading lengths over bins: nothing lost, bounds held, even, deterministic."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from vime.packing.balance import best_fit, even_bins, sequence_cost, spread

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=40)


def all_of(bins: list[list[int]]) -> list[int]:
    """All indices, sorted."""
    return sorted(index for members in bins for index in members)


@given(lengths=LENGTHS, budget=st.integers(10, 200))
@settings(max_examples=100, deadline=None)
def test_best_fit_holds_the_budget_and_loses_nothing(lengths: list[int], budget: int) -> None:
    bins = best_fit(lengths, budget)
    assert all_of(bins) == list(range(len(lengths)))
    for members in bins:
        assert sum(lengths[i] for i in members) <= budget or len(members) == 1
    fitting = [n for n in lengths if n <= budget]
    minimum = math.ceil(sum(fitting) / budget) + len(lengths) - len(fitting)
    assert minimum <= len(bins) <= 2 * minimum + 1


@given(lengths=LENGTHS, budget=st.integers(10, 200), extra=st.integers(0, 10))
@settings(max_examples=100, deadline=None)
def test_even_bins_holds_the_budget_and_gives_the_number_asked_for(lengths: list[int], budget: int, extra: int) -> None:
    wanted = len(best_fit(lengths, budget)) + extra
    bins = even_bins(lengths, wanted, budget=budget)
    assert all_of(bins) == list(range(len(lengths)))
    assert len(bins) == min(wanted, len(lengths))
    assert all(bins)
    for members in bins:
        assert sum(lengths[i] for i in members) <= budget or len(members) == 1
    totals = [sum(lengths[i] for i in members) for members in bins]
    assert totals == sorted(totals, reverse=True)


@given(lengths=LENGTHS, max_items=st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_even_bins_by_count(lengths: list[int], max_items: int) -> None:
    bins = even_bins(lengths, -(-len(lengths) // max_items), max_items=max_items)
    assert all_of(bins) == list(range(len(lengths)))
    assert max(len(members) for members in bins) <= max_items


@given(lengths=LENGTHS, num_bins=st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_spread_keeps_grahams_bound(lengths: list[int], num_bins: int) -> None:
    bins = spread(lengths, num_bins)
    assert bins is not None
    assert all_of(bins) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in members) for members in bins) <= sum(lengths) / num_bins + max(lengths)
    assert bins == spread(lengths, num_bins)


def test_spread_is_even_where_first_come_is_not() -> None:
    assert spread([9, 1, 8, 2], 2) == [[0, 1], [2, 3]]


def test_spread_says_when_it_cannot_hold_the_bounds() -> None:
    assert spread([6, 6, 6], 2, max_total=10) is None
    assert spread([1, 1, 1], 2, max_items=1) is None
    assert spread([20, 6], 2, max_total=10) == [[0], [1]]


def test_a_long_sequence_costs_more_than_its_tokens() -> None:
    assert sequence_cost(24_576) == 2 * 24_576
    assert sequence_cost(100) < 1.01 * 100
