"""What was sent against what was received."""

from __future__ import annotations

from vime.backends.megatron_utils.update_weight.compare import describe, differences

SENT = {name: ("float32", [2, 3], f"digest of {name}") for name in ("a", "b", "c")}


def received(**changes: list[object] | None) -> dict[str, list[object]]:
    values: dict[str, list[object] | None] = {name: list(value) for name, value in SENT.items()}
    return {name: value for name, value in (values | changes).items() if value is not None}


def test_equal_sides_differ_in_nothing() -> None:
    assert differences(SENT, received()) == {}


def test_each_kind_is_named() -> None:
    got = received(a=None, b=["float32", [3, 2], "digest of b"], c=["float32", [2, 3], "other"], d=["float32", [1], "x"])
    found = differences(SENT, got)
    assert found == {
        "missing": ["a"],
        "extra": ["d"],
        "of another shape or dtype": ["b (float32 [3, 2] instead of float32 [2, 3])"],
        "with other content": ["c"],
    }
    assert "1 tensor with other content: c" in describe(found)


def test_a_long_list_is_cut_with_a_count() -> None:
    sent = {f"t{number}": ("float32", [1], "x") for number in range(25)}
    assert describe(differences(sent, {}))[0].endswith("t9 and 15 more")
