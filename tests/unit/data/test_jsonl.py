"""Prompt files: every fault is named by file and line, with the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.config.prompt_sources import split_slice
from vime.data.jsonl import Row
from vime.data.tables import open_table
from vime.errors import ConfigError, DataError


def read_rows(spec: str) -> list[Row]:
    """All rows of a table."""
    table = open_table(spec)
    return [table.row(number) for number in range(len(table))]


def written(tmp_path: Path, text: str) -> str:
    """A prompt file with this text."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    return str(file)


def test_rows_keep_their_line_numbers_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = written(tmp_path, '{"input": "a"}\n\n{"input": "b"}\n')
    rows = read_rows(path)
    assert [(row.line, row.data["input"]) for row in rows] == [(1, "a"), (3, "b")]
    assert rows[1].where == f"{path}:3"


@pytest.mark.parametrize(
    ("part", "expected"), [("[1:3]", "12"), ("[:2]", "01"), ("[-2:]", "34"), ("[2:]", "234"), ("[:]", "01234"), ("[:-3]", "01")]
)
def test_a_slice_takes_rows_as_python_does(tmp_path: Path, part: str, expected: str) -> None:
    path = written(tmp_path, "".join(f'{{"input": "{n}"}}\n' for n in range(5)))
    assert "".join(row.data["input"] for row in read_rows(f"{path}@{part}")) == expected


def test_a_path_without_a_slice_is_left_alone() -> None:
    assert split_slice("/a/b@c.jsonl") == ("/a/b@c.jsonl", slice(None))


def test_a_slice_that_is_not_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"path@\[start:stop\]"):
        split_slice("prompts.jsonl@[five]")


def test_a_slice_that_takes_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="takes none of the file's 1 rows"):
        read_rows(written(tmp_path, '{"input": "a"}\n') + "@[5:9]")


def test_a_missing_file_is_named_with_its_neighbours(tmp_path: Path) -> None:
    written(tmp_path, "{}")
    with pytest.raises(DataError, match=r"--prompt-data .*promts\.jsonl does not exist .*'prompts\.jsonl'"):
        read_rows(str(tmp_path / "promts.jsonl"))
    with pytest.raises(DataError, match="nor does its folder"):
        read_rows(str(tmp_path / "nowhere" / "prompts.jsonl"))


def test_a_folder_and_another_kind_of_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match="is a folder"):
        read_rows(str(tmp_path / "folder.jsonl"))
    with pytest.raises(DataError, match=r"only \.jsonl and \.parquet files"):
        read_rows(str(tmp_path / "prompts.csv"))


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="is empty"):
        read_rows(written(tmp_path, text))


def test_a_malformed_line_is_shown_with_its_place(tmp_path: Path) -> None:
    path = written(tmp_path, '{"input": "a"}\n{"input": "b"\n')
    with pytest.raises(DataError, match=rf"{path}:2: the line is not valid JSON .*" + r"'\{\"input\": \"b\"'"):
        read_rows(path)


def test_a_line_that_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=":1: the line is a JSON list, not an object"):
        read_rows(written(tmp_path, '["a"]\n'))


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "latin.jsonl"
    file.write_bytes(b'{"input": "e"}\r\n' + '{"input": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.jsonl:2: the line is not UTF-8 text \(byte 0xe9 at column 12.*iconv"):
        read_rows(str(file))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"input": ' + "[" * 100_000 + "]" * 100_000 + "}", ":2: the line is nested too deep"),
        ('{"input": ' + "9" * 5000 + "}", r":2: the line holds a number that cannot be read.*Write it as a string"),
    ],
)
def test_json_that_python_cannot_hold_is_refused_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_rows(written(tmp_path, '{"input": "a"}\n' + text + "\n"))


def test_a_file_that_the_system_does_not_let_us_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--prompt-data .* cannot be read .*name too long.*permissions"):
        read_rows(str(tmp_path / ("x" * 300 + ".jsonl")))
    unreadable = tmp_path / "memory.jsonl"
    unreadable.symlink_to("/proc/self/mem")  # opens, and fails at the first read, for any user
    with pytest.raises(DataError, match=r"memory\.jsonl cannot be read \(Input/output error\)"):
        read_rows(str(unreadable))
