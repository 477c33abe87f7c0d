"""Tables of rows on disk: the same rows out of every kind of file, by number, slice and folder; faults named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vime.data.tables import BATCH_ROWS, Table, join_tables, open_table
from vime.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"input": [{"role": "user", "content": f"{n}+{n}"}], "label": str(2 * n), "metadata": {"level": n} if n % 2 else {"why": "even"}}
    for n in range(7)
]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    return path


def write_dataset(path: Path, rows: list[dict[str, Any]]) -> Path:
    """What datasets.Dataset.save_to_disk writes, in two files."""
    path.mkdir()
    table = pa.Table.from_pylist(rows)
    names = [f"data-{part:05d}-of-00002.arrow" for part in range(2)]
    for name, part in zip(names, (table.slice(0, 4), table.slice(4)), strict=True):
        with pa.ipc.new_stream(str(path / name), table.schema) as out:
            out.write_table(part, max_chunksize=2)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train"}))
    return path


def write_shards(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.mkdir()
    write_parquet(path / "train-00001-of-00002.parquet", rows[3:])
    write_parquet(path / "train-00000-of-00002.parquet", rows[:3])
    return path


KINDS = {"rows.jsonl": write_jsonl, "rows.parquet": write_parquet, "saved": write_dataset, "shards": write_shards}


def rows_of(table: Table) -> list[dict[str, Any]]:
    return [table.row(number).data for number in range(len(table))]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_rows_that_were_written(tmp_path: Path, name: str) -> None:
    path = KINDS[name](tmp_path / name, ROWS)
    assert rows_of(open_table(str(path))) == ROWS
    assert rows_of(open_table(f"{path}@[-3:]")) == ROWS[-3:]
    assert rows_of(open_table(f"{path}@[1:2]")) == ROWS[1:2]


@pytest.mark.parametrize("name", KINDS)
def test_the_digest_is_that_of_the_content(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, same = (open_table(str(KINDS[name](tmp_path / folder / name, ROWS))) for folder in "ab")
    other = open_table(str(KINDS[name](tmp_path / f"other-{name}", [*ROWS[:6], ROWS[0]])))
    assert one.digest() == same.digest()
    assert len({one.digest(), other.digest(), open_table(f"{tmp_path / 'a' / name}@[:5]").digest()}) == 3


def test_rows_are_named_by_line_or_row(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('\n{"input": "a"}\n  \t\n{"input": "b"}')
    assert [open_table(str(lines)).row(n).where for n in range(2)] == [f"{lines}:2", f"{lines}:4"]
    table = write_parquet(tmp_path / "a.parquet", ROWS)
    assert open_table(str(table)).row(4).where == f"{table} row 5"


def test_a_parquet_file_of_many_batches_is_read_by_number(tmp_path: Path) -> None:
    count = 2 * BATCH_ROWS + 5
    pq.write_table(pa.table({"input": [str(n) for n in range(count)]}), tmp_path / "many.parquet", row_group_size=1000)
    table = open_table(str(tmp_path / "many.parquet"))
    assert len(table) == count
    for number in (0, BATCH_ROWS - 1, BATCH_ROWS, count - 1):
        assert table.row(number).data == {"input": str(number)}


def test_joined_tables_follow_one_another(tmp_path: Path) -> None:
    parts = [open_table(str(write_jsonl(tmp_path / f"{at}.jsonl", ROWS[at : at + 2]))) for at in (0, 2, 4)]
    assert rows_of(join_tables(parts)) == ROWS[:6]
    assert join_tables(parts[:1]) is parts[0]


def test_a_dataset_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"with the splits 'train', 'test': give the folder of one, e\.g\. .*/train"):
        open_table(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "holds neither a saved dataset"),
        ({"state.json": "{}"}, "not that of a saved dataset"),
        ({"state.json": '{"_data_files": [{"filename": "gone.arrow"}]}'}, "cannot be read .*No such file"),
        ({"state.json": '{"_data_files": [{"filename": "x.arrow"}]}', "x.arrow": "no arrow"}, "not an Arrow stream"),
        ({"x.parquet": "no parquet"}, "not a parquet file that can be read"),
    ],
)
def test_a_folder_that_is_no_dataset_is_named(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=said):
        open_table(str(tmp_path))
