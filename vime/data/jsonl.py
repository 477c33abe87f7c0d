"""Reading prompt files: one JSON object a line, with every fault named by file and line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.errors import DataError

__all__ = ["Row", "read_rows", "split_slice"]

_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a prompt file."""

    file: str
    line: int  # from 1
    data: dict[str, Any]

    @property
    def where(self) -> str:
        """file:line, as editors understand it."""
        return f"{self.file}:{self.line}"

    def column(self, key: str, *, flag: str, what: str) -> Any:
        """The value under `key`; a DataError that lists the keys there are when it is missing."""
        if key not in self.data:
            raise DataError(
                f"{self.where}: no column '{key}' ({what}); the row has {_listed(self.data)}. Name the right column with {flag}."
            )
        return self.data[key]


def split_slice(spec: str) -> tuple[str, slice]:
    """'path@[a:b]' -> (path, slice(a, b)); either bound may be missing or negative, as in Python."""
    match = _SLICE.match(spec)
    if match is None:
        if "@[" in spec:
            raise DataError(f"'{spec}': the slice is not of the form path@[start:stop], e.g. prompts.jsonl@[0:100].")
        return spec, slice(None)
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    return match["path"], slice(start, stop)


def read_rows(spec: str, *, flag: str = "--prompt-data") -> list[Row]:
    """All rows of a `.jsonl` file (blank lines are skipped), or the slice of them that 'path@[a:b]' names.

    Raises:
        DataError: the file is missing, no .jsonl, empty, not UTF-8, or a line is not a JSON object; the message names
            file:line, the offending text and the cure.
    """
    path, part = split_slice(spec)
    file = Path(path)
    if file.suffix != ".jsonl":
        raise DataError(f"{flag} {path}: only .jsonl files are read (one JSON object a line). Convert the file.")
    if not file.is_file():
        kind = "is a folder" if file.is_dir() else "does not exist"
        near = _neighbours(file)
        raise DataError(f"{flag} {path} {kind}{near}. Give the path of a .jsonl file.")
    try:
        with file.open(encoding="utf-8") as lines:
            rows = [row for number, line in enumerate(lines, 1) if (row := _parse(path, number, line)) is not None]
    except UnicodeDecodeError as error:
        raise DataError(f"{flag} {path} is not UTF-8 text ({error}). Re-encode it, e.g. with iconv.") from error
    if not rows:
        raise DataError(f"{flag} {path} is empty: it holds no JSON line. Give a file with at least one prompt.")
    chosen = rows[part]
    if not chosen:
        raise DataError(f"{flag} {spec}: the slice takes none of the file's {len(rows)} rows.")
    return chosen


def _parse(path: str, number: int, line: str) -> Row | None:
    if not line.strip():
        return None
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{number}: the line is not valid JSON ({error.msg} at column {error.colno}): {_shown(line)}. "
            "Each line must be one complete JSON object; mend or remove this one."
        ) from error
    if not isinstance(data, dict):
        raise DataError(
            f"{path}:{number}: the line is a JSON {type(data).__name__}, not an object: {_shown(line)}. "
            'Each line must look like {"input": ..., "label": ...}.'
        )
    return Row(file=path, line=number, data=data)


def _shown(line: str) -> str:
    text = line.strip()
    return repr(text if len(text) <= 120 else text[:117] + "...")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "no columns"


def _neighbours(file: Path) -> str:
    """What lies where the file was looked for, to make a typing error plain."""
    parent = file.parent
    if not parent.is_dir():
        return f" (nor does its folder {parent})"
    found = sorted(entry.name for entry in parent.iterdir() if entry.suffix == ".jsonl")[:5]
    return f" (its folder has {_listed(found)})" if found else " (its folder has no .jsonl file)"
