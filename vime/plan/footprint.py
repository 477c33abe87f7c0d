"""What a plan is made of: items of memory, and the processes or devices that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Footprint", "Item", "total"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One kind of memory of one role."""

    role: str  # "trainer", "engine", ...
    name: str
    num_bytes: int


def total(items: Sequence[Item]) -> int:
    """Bytes of all items together."""
    return sum(item.num_bytes for item in items)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """`count` devices that hold the same, phase by phase."""

    where: str  # "GPU 0-3", "this machine", "node 0"
    what: str
    count: int
    capacity: int | None  # bytes; None = not known
    phases: Mapping[str, Sequence[Item]]

    @property
    def peak_phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: total(self.phases[phase]))

    @property
    def peak(self) -> int:
        """Bytes needed in that phase."""
        return total(self.phases[self.peak_phase])

    @property
    def excess(self) -> int:
        """Bytes by which the peak is above the capacity; 0 when it fits or the capacity is not known."""
        return 0 if self.capacity is None else max(0, self.peak - self.capacity)

    @property
    def largest(self) -> Item:
        """The largest item of the peak phase."""
        return max(self.phases[self.peak_phase], key=lambda item: item.num_bytes)
