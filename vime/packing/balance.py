"""Spreading sequences of uneven lengths over ranks and micro-batches. Plain integers in, index lists out; deterministic."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

__all__ = ["best_fit", "even_bins", "sequence_cost", "spread"]

ATTENTION_LENGTH = 24_576  # tokens at which causal attention costs as much as the linear layers: 12 x hidden size, here of 2048


def sequence_cost(length: int) -> float:
    """Training cost of one sequence in units of one token's linear layers: T x (1 + T / ATTENTION_LENGTH).

    A layer does 24 h^2 multiply-adds a token in its matrices and 2 T h in causal attention (Narayanan et al.,
    arXiv:2104.04473, appendix), so attention's share is T / (12 h).
    """
    return length * (1.0 + length / ATTENTION_LENGTH)


def spread(
    costs: Sequence[float], num_bins: int, *, max_items: int | None = None, max_total: float | None = None
) -> list[list[int]] | None:
    """Indices of `costs` in `num_bins` bins of nearly equal total: longest processing time first (Graham 1969).

    None when this order of filling cannot keep every bin within `max_items` and `max_total`. An item above `max_total` may
    stand alone. Bins may be empty only when there are fewer items than bins. Indices ascend inside a bin.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0.0, number) for number in range(num_bins)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        while heap and max_items is not None and len(bins[heap[0][1]]) >= max_items:
            heapq.heappop(heap)
        if not heap:
            return None
        total, number = heap[0]
        if max_total is not None and bins[number] and total + costs[index] > max_total:
            return None
        bins[number].append(index)
        heapq.heapreplace(heap, (total + costs[index], number))
    return [sorted(members) for members in bins]


def best_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of `lengths` in as few bins of at most `budget` as best-fit-decreasing finds; longer items stand alone."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(rooms, (lengths[index], -1))
        if place < len(rooms):
            room, number = rooms.pop(place)
            bins[number].append(index)
        else:
            room, number = budget, len(bins)
            bins.append([index])
        insort(rooms, (room - lengths[index], number))
    return [sorted(members) for members in bins]


def even_bins(lengths: Sequence[int], num_bins: int, *, budget: int | None = None, max_items: int | None = None) -> list[list[int]]:
    """Indices of `lengths` in at most `num_bins` bins, as even as they come, largest first; no bin is empty.

    `budget` bounds a bin's total (a longer item stands alone), `max_items` its size; `num_bins` must be at least what
    `best_fit`, or the size, needs. There are fewer than `num_bins` bins only when there are fewer items.
    """
    bins = spread(lengths, num_bins, max_items=max_items, max_total=budget)
    if bins is None:
        assert budget is not None
        bins = best_fit(lengths, budget)
    while len(bins) < min(num_bins, len(lengths)):
        largest = max((members for members in bins if len(members) > 1), key=lambda members: sum(lengths[i] for i in members))
        halves = spread([lengths[i] for i in largest], 2)
        assert halves is not None
        bins.remove(largest)
        bins.extend([largest[i] for i in half] for half in halves)
    full = [members for members in bins if members]
    return sorted(full, key=lambda members: (-sum(lengths[i] for i in members), members))
