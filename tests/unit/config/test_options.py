"""An owner's parser: all that is wrong at once, described as plain data, remembered for suggestions."""

from __future__ import annotations

import argparse
import enum
import json
from pathlib import Path

import pytest

from vime.config.options import describe, load_options, parse_all, store_options


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    group = made.add_argument_group("numbers")
    group.add_argument("-n", "--num-x", type=int, default=3, help="How many (default: %(default)s), 5%% more.")
    group.add_argument("--words", nargs="+", choices=["a", "b"])
    group.add_argument("--on", action=argparse.BooleanOptionalAction, default=True, help="Whether.")
    group.add_argument("--each", action="append")
    made.add_argument("--hidden", help=argparse.SUPPRESS)
    return made


def test_what_parses_is_told_without_defaults() -> None:
    tokens = "--num-x 4 --words a b --no-on --each 1 --each 2".split()
    assert parse_all(parser(), tokens) == ({"num_x": 4, "words": ["a", "b"], "on": False, "each": ["1", "2"]}, [])


def test_every_mistake_is_told_and_what_is_right_is_kept() -> None:
    known, problems = parse_all(parser(), "--num-x four --words a c --on 1 --num 5 --x.y 1 --each a --on --no-on".split())
    assert problems == [
        "argument -n/--num-x: invalid int value: 'four'",
        "argument --words: invalid choice: 'c' (choose from 'a', 'b')",
        "--on: '1' is more than it takes.",
        "unknown flag --num.",
        "unknown flag --x.y.",
        "--on is given twice, as '--on 1' and '--on': keep one.",
        "--no-on is given twice, as '--on 1' and '--no-on': keep one.",
    ]
    assert known["each"] == ["a"]


def test_a_flag_given_twice_with_the_same_value_is_no_problem() -> None:
    assert parse_all(parser(), ["--num-x", "4", "--num-x", "4"])[1] == []


def test_one_value_too_many_is_no_positional_argument() -> None:
    made = parser()
    made.add_argument("model", nargs="?")
    assert parse_all(made, ["--num-x", "4", "5"])[1] == ["--num-x: '5' is more than it takes."]


def test_a_dotted_flag_given_twice_is_told() -> None:
    made = argparse.ArgumentParser()
    made.add_argument("--cfg", type=json.loads)
    made.parse_args = lambda words: argparse.Namespace()  # type: ignore[method-assign, assignment] # one that takes dotted names
    assert parse_all(made, ["--cfg.a", "1", "--cfg.b", "1"])[1] == []
    assert parse_all(made, ["--cfg.a", "1", "--cfg.a", "2"])[1] == ["--cfg.a is given twice, as '--cfg.a 1' and '--cfg.a 2': keep one."]


def test_underscores_are_dashes_where_the_parser_takes_them_so() -> None:
    assert parse_all(parser(), ["--num_x", "4"])[1] == ["unknown flag --num_x."]


def test_options_are_described_with_what_they_take() -> None:
    found = {option.flags[0]: option for option in describe(parser(), {"--words": "no words here"})}
    assert list(found) == ["--help", "--num-x", "--words", "--on", "--each"]
    assert (found["--num-x"].takes, found["--num-x"].default, found["--num-x"].group) == ("INT", "3", "numbers")
    assert found["--num-x"].help == "How many (default: 3), 5% more."
    assert (found["--words"].takes, found["--words"].note) == ("{a,b} ...", "no words here")
    assert (found["--on"].flags, found["--on"].takes) == (("--on", "--no-on"), "")


def test_members_of_an_enumeration_are_described_as_they_are_typed() -> None:
    numbers = enum.Enum("numbers", {"flash": 1, "auto": 2})
    texts = enum.Enum("texts", {"SHORT": "short"})
    made = argparse.ArgumentParser()
    made.add_argument("--backend", choices=list(numbers), default=numbers.auto)
    made.add_argument("--form", choices=list(texts), default=texts.SHORT)
    _, backend, form = describe(made, {})
    assert (backend.takes, backend.default) == ("{flash,auto}", "auto")
    assert (form.takes, form.default) == ("{short}", "short")


def test_options_are_remembered_for_one_state_of_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = describe(parser(), {})
    assert load_options("megatron", "1") is None
    store_options("megatron", "1", options)
    assert load_options("megatron", "1") == options
    assert load_options("megatron", "2") is None
    (tmp_path / "vime" / "megatron_options.json").write_text('{"key": ')
    assert load_options("megatron", "1") is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    store_options("megatron", "1", [])
    assert load_options("megatron", "1") is None
