"""Prompt files as tables: rows stay on disk and are read when they are asked for.

.jsonl          mapped; where its lines begin is found in one pass
.parquet        decoded once, batch by batch, into a mapped temporary file that has no name and goes with the process
a folder        of `datasets.Dataset.save_to_disk` (mapped .arrow files), or of .parquet or .jsonl files, one after the other
"""

from __future__ import annotations

import bisect
import itertools
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from vime.config.prompt_sources import split_slice
from vime.data.jsonl import Row, parse_row
from vime.errors import DataError

__all__ = ["Table", "join_tables", "open_table"]

CHUNK = 1 << 26  # bytes looked through at a time for line ends
BATCH_ROWS = 4096  # of a decoded parquet file
BLANK = np.frombuffer(b"\t\n\x0b\x0c\r ", dtype=np.uint8)


class Table(Protocol):
    """Rows by number. `digest` identifies their content."""

    def __len__(self) -> int: ...

    def row(self, number: int) -> Row:
        """Row `number` from 0. Raises DataError, naming file and line, when it is malformed."""
        ...

    def place(self, number: int) -> tuple[str, int, str]:
        """(file, line or row from 1, "line" or "row") of row `number`."""
        ...

    def digest(self) -> str: ...


def open_table(spec: str, *, flag: str = "--prompt-data") -> Table:
    """The rows of 'path@[a:b]'.

    Raises:
        DataError: the path is missing, of no known kind, cannot be read, empty, or the slice takes nothing.
    """
    path, part = split_slice(spec)
    try:
        table = _open(Path(path), flag)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{flag} {path} cannot be read ({reason}). Check its path, its permissions and the disk it is on.") from error
    if not len(table):
        raise DataError(f"{flag} {path} is empty: it holds no row. Give a file with at least one prompt.")
    chosen = range(len(table))[part]
    if not chosen:
        raise DataError(f"{flag} {spec}: the slice takes none of the file's {len(table)} rows.")
    return table if len(chosen) == len(table) else _Slice(table, chosen)


def join_tables(tables: Sequence[Table]) -> Table:
    """All rows, table by table."""
    return tables[0] if len(tables) == 1 else _Joined(tables)


def _open(path: Path, flag: str) -> Table:
    if path.is_dir() and path.suffix not in _KINDS:
        return _open_folder(path, flag)
    if path.suffix not in _KINDS:
        raise DataError(f"{flag} {path}: only .jsonl and .parquet files and folders of datasets are read. Convert the file.")
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{flag} {path} {kind}{_neighbours(path)}. Give the path of a .jsonl or .parquet file, or a dataset's folder.")
    return _KINDS[path.suffix](path)


def _open_folder(path: Path, flag: str) -> Table:
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8")).get("splits", [])
        raise DataError(f"{flag} {path} is a dataset with the splits {_listed(splits)}: give the folder of one, e.g. {path}/{splits[0]}.")
    if (path / "state.json").is_file():
        try:
            names = [entry["filename"] for entry in json.loads((path / "state.json").read_text(encoding="utf-8"))["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{flag} {path}: its state.json is not that of a saved dataset ({error}). Save the dataset again.") from error
        return join_tables([_ArrowTable(str(path / name), *_mapped_stream(path / name)) for name in names])
    for suffix, kind in _KINDS.items():
        if files := sorted(path.glob(f"*{suffix}")):
            return join_tables([kind(file) for file in files])
    raise DataError(f"{flag} {path}: the folder holds neither a saved dataset (state.json) nor .parquet or .jsonl files.")


class _Slice:
    """Some rows of a table, in its order."""

    def __init__(self, table: Table, chosen: range) -> None:
        self._table, self._chosen = table, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def row(self, number: int) -> Row:
        return self._table.row(self._chosen[number])

    def place(self, number: int) -> tuple[str, int, str]:
        return self._table.place(self._chosen[number])

    def digest(self) -> str:
        return f"{self._table.digest()}[{self._chosen.start}:{self._chosen.stop}]"


class _Joined:
    """Tables one after the other."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._starts = [0, *itertools.accumulate(len(table) for table in tables)]

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, number: int) -> Row:
        at = bisect.bisect_right(self._starts, number) - 1
        return self._tables[at].row(number - self._starts[at])

    def place(self, number: int) -> tuple[str, int, str]:
        at = bisect.bisect_right(self._starts, number) - 1
        return self._tables[at].place(number - self._starts[at])

    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(" ".join(table.digest() for table in self._tables).encode())


class _JsonLines:
    """A .jsonl file; blank lines are no rows."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.read(1) else None
        self._starts, self._lines = self._find_lines()

    def _find_lines(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Of each line that is not blank: where it begins, and its number from 1."""
        if self._bytes is None:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        view = np.frombuffer(self._bytes, dtype=np.uint8)
        ends = [np.flatnonzero(view[at : at + CHUNK] == ord("\n")) + at for at in range(0, len(view), CHUNK)]
        starts = np.concatenate([np.zeros(1, np.int64), *ends]).astype(np.int64)
        starts[1:] += 1
        starts = starts[starts < len(view)]
        suspects = np.flatnonzero(np.isin(view[starts], BLANK))
        blank = [at for at in suspects.tolist() if not self._line(int(starts[at])).strip()]
        lines = np.arange(1, len(starts) + 1)
        return np.delete(starts, blank), np.delete(lines, blank)

    def _line(self, start: int) -> bytes:
        assert self._bytes is not None
        end = self._bytes.find(b"\n", start)
        return self._bytes[start : end if end >= 0 else len(self._bytes)]

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, number: int) -> Row:
        return parse_row(self._path, int(self._lines[number]), self._line(int(self._starts[number])))

    def place(self, number: int) -> tuple[str, int, str]:
        return self._path, int(self._lines[number]), "line"

    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self._bytes or b"")


class _ArrowTable:
    """Record batches of Arrow, mapped. A field that is null counts as absent inside nested values."""

    def __init__(self, name: str, batches: Sequence[Any], digest: str) -> None:
        self._name, self._batches, self._digest = name, batches, digest
        self._starts = [0, *itertools.accumulate(batch.num_rows for batch in batches)]

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, number: int) -> Row:
        at = bisect.bisect_right(self._starts, number) - 1
        (data,) = self._batches[at].slice(number - self._starts[at], 1).to_pylist()
        return Row(file=self._name, line=number + 1, data={key: _without_nulls(value) for key, value in data.items()}, unit="row")

    def place(self, number: int) -> tuple[str, int, str]:
        return self._name, number + 1, "row"

    def digest(self) -> str:
        return self._digest


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct all fields that any of them has."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _parquet(path: Path) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    spool = tempfile.TemporaryFile(prefix="vime-rows-")  # noqa: SIM115 - mapped as long as the table lives
    try:
        with pq.ParquetFile(path, memory_map=True) as source, pa.ipc.new_file(spool, source.schema_arrow) as out:
            for batch in source.iter_batches(batch_size=BATCH_ROWS):
                out.write_batch(batch)
        spool.flush()
        reader = pa.ipc.open_file(pa.memory_map(f"/proc/self/fd/{spool.fileno()}"))
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a parquet file that can be read ({_first_line(error)}). Write the file again.") from error
    finally:
        spool.close()
    return _ArrowTable(str(path), batches, _file_digest(path))


def _mapped_stream(path: Path) -> tuple[list[Any], str]:
    """The batches of one .arrow file of a saved dataset, mapped, and the file's digest."""
    import pyarrow as pa

    try:
        reader = pa.ipc.open_stream(pa.memory_map(str(path)))
        return [batch for batch in reader if batch.num_rows], _file_digest(path)
    except pa.ArrowException as error:
        raise DataError(f"{path}: not an Arrow stream ({_first_line(error)}). Save the dataset again.") from error


def _file_digest(path: Path) -> str:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return xxhash.xxh3_128_hexdigest(content)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


_KINDS: dict[str, Callable[[Path], Table]] = {".jsonl": _JsonLines, ".parquet": _parquet}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _neighbours(file: Path) -> str:
    """What lies where the file was looked for, to make a typing error plain."""
    parent = file.parent
    if not parent.is_dir():
        return f" (nor does its folder {parent})"
    found: Iterator[str] = (entry.name for entry in sorted(os.scandir(parent), key=lambda e: e.name) if Path(entry.name).suffix in _KINDS)
    names = list(itertools.islice(found, 5))
    return f" (its folder has {_listed(names)})" if names else " (its folder has no .jsonl or .parquet file)"
