"""Comparing two recordings: exact within a layout, within rounding between layouts, and the place of the largest difference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vime.capsule.compare import TOLERANCES, compare, stages_in_words
from vime.capsule.results import STAGES, Item, ParameterRows


def parameters(stage: str, name: str, change: float = 0.0, *, scale: float = 1.0, exact: bool = False, step: int | None = 0) -> Item:
    rows = ParameterRows()
    for number, label in enumerate(("a", "b")):
        values = scale * torch.arange(1.0, 6.0) * (number + 1)
        values[3] += change * number
        rows.add(label, values)
    return rows.item(stage, name, step=step, exact=exact)


def recording(**changes: float) -> list[Item]:
    """One item a stage; `changes` move one value of a stage."""
    out = []
    for stage in STAGES:
        name, change = stage.replace("-", "_"), changes.get(stage.replace("-", "_"), 0.0)
        if stage in ("gradient", "update"):
            out.append(parameters(stage, "gradients" if stage == "gradient" else "weights", change))
            continue
        rows = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0])]
        rows[0][1] += change
        exact = stage in ("tokenize", "pack")
        out.append(Item(stage=stage, name=name, labels=("sample 4", "sample 7"), rows=tuple(rows), exact=exact))
    return [*out, parameters("forward", "weights", changes.get("start", 0.0), scale=0.9, exact=True, step=None)]


def test_equal_recordings_do_not_differ() -> None:
    for same in (True, False):
        assert compare(recording(), recording(), same_layout=same) == []
    assert stages_in_words(recording(), []) == [
        *(f"{stage}: the same" for stage in STAGES[:6]),
        *(f"optimizer step 0, {stage}: the same" for stage in STAGES[6:]),
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_one_bit_is_a_difference_of_its_stage_in_the_same_layout(stage: str) -> None:
    changed = recording(**{stage.replace("-", "_"): 5e-7})
    (found,) = compare(recording(), changed, same_layout=True)
    assert found.item.stage == stage
    assert found.where == ("b, element 3" if stage in ("gradient", "update") else "sample 4, token 1")
    assert 0 < found.largest < 1e-6
    assert [line for line in stages_in_words(recording(), [found]) if "differs" in line] == [str(found)]


@pytest.mark.parametrize("stage", [stage for stage in STAGES if TOLERANCES[stage]])
def test_between_layouts_rounding_passes_and_more_does_not(stage: str) -> None:
    name = stage.replace("-", "_")
    assert compare(recording(), recording(**{name: 1e-6}), same_layout=False) == []
    found = compare(recording(), recording(**{name: 0.1}), same_layout=False)
    assert [one.item.stage for one in found] == [stage]
    assert compare(recording(), recording(**{name: 0.05}), same_layout=False, dtype="bfloat16") == []


@pytest.mark.parametrize(("name", "stage"), [("tokenize", "tokenize"), ("pack", "pack"), ("start", "forward")])
def test_what_no_layout_changes_is_exact_in_all(name: str, stage: str) -> None:
    found = compare(recording(), recording(**{name: 5e-7}), same_layout=False)
    assert [one.item.stage for one in found] == [stage]


def test_the_order_is_that_of_the_step() -> None:
    later = [replace(item, step=1) for item in recording() if item.step == 0]
    moved = [replace(item, step=1) for item in recording(update=1.0, gradient=1.0) if item.step == 0]
    found = compare([*later, *recording()], [*moved, *recording(update=1.0)], same_layout=True)
    assert [(one.item.step, one.item.stage) for one in found] == [(0, "update"), (1, "gradient"), (1, "update")]


def test_a_weight_whose_gradient_is_rounding_may_move_either_way() -> None:
    """Adam moves it by as much as the others."""

    def items(sign: float) -> list[Item]:
        before, after, gradient = torch.ones(3), torch.ones(3), torch.tensor([1.0, -2.0, sign * 1e-6])
        after[:2] -= 1e-3 * gradient[:2].sign()
        after[2] -= sign * 1e-3
        made = (("forward", "weights", before, None), ("gradient", "gradients", gradient, 0), ("update", "weights", after, 0))
        out = []
        for stage, name, tensor, step in made:
            rows = ParameterRows()
            rows.add("w", tensor)
            out.append(rows.item(stage, name, step=step, exact=step is None))
        return out

    assert compare(items(1.0), items(-1.0), same_layout=False) == []
    wrong = items(1.0)
    rows = ParameterRows()
    rows.add("w", wrong[2].rows[0] + torch.tensor([2e-3, 0.0, 0.0]))
    assert [d.item.stage for d in compare(items(1.0), [*wrong[:2], rows.item("update", "weights", step=0)], same_layout=False)] == [
        "update"
    ]


def test_what_only_one_has_is_a_difference() -> None:
    left = recording()
    assert [d.where for d in compare(left, left[:3] + left[4:], same_layout=True)] == ["all of it: the replay has none"]
    fewer = [replace(item, labels=item.labels[:1], rows=item.rows[:1], digests=item.digests[:1]) for item in left]
    assert "sample 7, which only one of them has" in compare(left, fewer, same_layout=True)[0].where
    shorter = [replace(left[0], rows=(left[0].rows[0][:2], left[0].rows[1])), *left[1:]]
    assert compare(left, shorter, same_layout=False)[0].where == "sample 4: 2 values instead of 3"


def test_not_a_number_equals_itself_and_nothing_else() -> None:
    nan = recording(loss=float("nan"))
    assert compare(nan, nan, same_layout=False) == []
    assert [d.item.stage for d in compare(recording(), nan, same_layout=False)] == ["loss"]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_of_a_gradient_that_is_not_finite_the_other_values_are_compared(value: float) -> None:
    """Of a step that failed, under another layout: equal, within rounding, and beyond."""

    def gradient(change: float) -> list[Item]:
        rows = ParameterRows()
        rows.add("a", torch.tensor([2.0 + change, value, -value, 1.0]))
        return [rows.item("gradient", "gradients", step=0)]

    for change, expected in ((0.0, []), (1e-5, []), (0.1, ["gradient"])):
        found = compare(gradient(0.0), gradient(change), same_layout=False)
        assert [d.item.stage for d in found] == expected


def test_a_change_between_the_values_that_are_kept_is_seen_in_the_same_layout() -> None:
    def item(change: float) -> Item:
        rows, values = ParameterRows(), torch.zeros(10_000)
        values[1] = change
        rows.add("w", values)
        return rows.item("update", "weights", step=0)

    (found,) = compare([item(0.0)], [item(1.0)], same_layout=True)
    assert str(found) == "optimizer step 0, update: weights differs at w, in none of the values that are kept"


def test_what_the_layout_decides_is_compared_in_the_same_layout_only() -> None:
    placed = Item(stage="pack", name="micro-batch", labels=("sample 1",), rows=(torch.tensor([0, 1]),), of_layout=True)
    other = replace(placed, rows=(torch.tensor([1, 1]),))
    assert compare([placed], [other], same_layout=False) == []
    assert len(compare([placed], [other], same_layout=True)) == 1
