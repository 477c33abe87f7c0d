"""Two recordings of one step against each other: which stage is the first that differs, how much, and where.

Within one layout everything is compared bit for bit. Between layouts sums are taken in another order, so what was computed is
compared within `TOLERANCES`; what was not computed (tokens, masks, rewards, weights before the step) stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vime.capsule.results import Item

__all__ = ["TOLERANCES", "Difference", "compare", "stages_in_words"]

# What rounding may change between layouts in float32, where sums of numbers of order 1 agree to about 1e-6:
# forward to loss: relative to the largest value of the sample (at least 1). gradient: relative to the largest value of its parameter.
# update: the root mean square of a parameter's difference relative to its change in the step, over the values whose gradient is more
# than `NOISE` of the largest of all: Adam divides by the gradient's size, so a gradient that is nothing but rounding moves a weight
# by as much as any other, either way.
TOLERANCES = {
    "tokenize": 0.0, "pack": 0.0, "forward": 1e-4, "log-prob": 1e-4, "advantage": 1e-4, "loss": 1e-4, "gradient": 1e-3, "update": 1e-2,
}  # fmt: skip
NOISE = 1e-4
BFLOAT16 = 300.0  # times wider: 8 bits of mantissa instead of 24, and errors that average out
NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest difference of one item, in its stage's measure; `count` of `total` rows differ."""

    item: Item
    largest: float
    where: str
    count: int
    total: int

    def __str__(self) -> str:
        many = f" ({self.count} of {self.total} differ)" if self.count > 1 else ""
        amount = "" if self.largest in (0.0, NEVER) else f" by {self.largest:.3g}"
        return f"{_title(self.item)}: {self.item.name} differs{amount} at {self.where}{many}"


def compare(recorded: Sequence[Item], replayed: Sequence[Item], *, same_layout: bool, dtype: str = "float32") -> list[Difference]:
    """What differs, in the order in which the step computes it; empty when nothing does.

    With `same_layout` False stages are compared within `TOLERANCES`, wider for `dtype` bfloat16.
    """
    there = {_key(item): item for item in replayed}
    here = {_key(item): item for item in recorded}
    out = []
    for item in sorted(recorded, key=lambda item: item.order):
        if item.of_layout and not same_layout:
            continue
        other = there.get(_key(item))
        if other is None:
            out.append(Difference(item=item, largest=NEVER, where="all of it: the replay has none", count=1, total=1))
            continue
        tolerance = 0.0 if item.exact or same_layout else TOLERANCES[item.stage] * (BFLOAT16 if dtype == "bfloat16" else 1.0)
        scales = _Scales(item, here.get(("forward", None, "weights")), here.get(("gradient", item.step, "gradients")))
        found = _differs(item, other, tolerance, scales)
        if found is not None:
            out.append(found)
    return out


def stages_in_words(recorded: Sequence[Item], differences: Sequence[Difference]) -> list[str]:
    """One line a stage, in the order in which the step goes through them: the same, or by what it differs first."""
    first: dict[str, str] = {}
    for difference in differences:
        first.setdefault(_title(difference.item), str(difference))
    titles = dict.fromkeys(_title(item) for item in sorted(recorded, key=lambda item: item.order))
    return [first.get(title, f"{title}: the same") for title in titles]


def _title(item: Item) -> str:
    return item.stage if item.step is None else f"optimizer step {item.step}, {item.stage}"


def _key(item: Item) -> tuple[str, int | None, str]:
    return item.stage, item.step, item.name


class _Scales:
    """What the differences of an item are relative to."""

    def __init__(self, item: Item, before: Item | None, gradients: Item | None) -> None:
        self._item = item
        self._before = before if item.stage == "update" and item.digests else None
        self._gradients = gradients if self._before is not None or (item.stage == "gradient" and item.digests) else None
        rows = () if self._gradients is None else self._gradients.rows
        self._largest = max((_peak(row) for row in rows), default=0.0)

    def relative(self, apart: torch.Tensor, i: int) -> float:
        """The differences `apart` of row i as one number, in the measure of the stage."""
        row = self._item.rows[i].double()
        if self._before is not None:
            moved = row - self._before.rows[i].double()
            if self._gradients is not None:
                clear = self._gradients.rows[i].abs() > NOISE * self._largest
                apart, moved = apart[clear], moved[clear]
            return float((apart.square().sum() / moved.square().sum().clamp(min=1e-30)).sqrt()) if apart.any() else 0.0
        if self._gradients is not None:
            return float(apart.max()) / max(_peak(row), NOISE * self._largest, 1e-30)
        return float(apart.max()) / max(_peak(row), 1.0)


def _peak(row: torch.Tensor) -> float:
    """The largest value that is a number; 0 where there is none."""
    return float(row.nan_to_num(0.0, 0.0, 0.0).abs().max()) if row.numel() else 0.0


def _differs(item: Item, other: Item, tolerance: float, scales: _Scales) -> Difference | None:
    if item.labels != other.labels:
        apart = sorted(set(item.labels) ^ set(other.labels)) or ["their order"]
        where = f"{apart[0]}, which only one of them has"
        return Difference(item=item, largest=NEVER, where=where, count=len(apart), total=len(item.labels))
    found = [(amount, label + where) for i, label in enumerate(item.labels) for amount, where in [_row(item, other, i, tolerance, scales)]]
    wrong = [(amount, where) for amount, where in found if amount is not None]
    if not wrong:
        return None
    amount, where = max(wrong, key=lambda pair: pair[0])
    return Difference(item=item, largest=amount, where=where, count=len(wrong), total=len(item.labels))


def _row(item: Item, other: Item, i: int, tolerance: float, scales: _Scales) -> tuple[float | None, str]:
    """(how much row i differs, None when it does not; where in it)."""
    a, b = item.rows[i], other.rows[i]
    if a.shape != b.shape:
        return NEVER, f": {len(b)} values instead of {len(a)}"
    same = item.digests[i] == other.digests[i] if item.digests else a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
    if same:
        return None, ""
    apart = torch.nan_to_num((a.double() - b.double()).abs(), nan=NEVER).masked_fill((a.isnan() & b.isnan()) | (a == b), 0.0)
    if tolerance:
        amount = scales.relative(apart, i) if apart.numel() else 0.0
        if amount <= tolerance:
            return None, ""
    else:
        amount = float(apart.max()) if apart.numel() else 0.0
    if not amount:
        return amount, ", in none of the values that are kept"
    place = int(apart.reshape(len(a), -1).amax(-1).argmax())
    if item.digests:
        return amount, f", element {round(place * item.strides[i])}"
    return amount, f", token {place}" if len(a) > 1 else ""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)
