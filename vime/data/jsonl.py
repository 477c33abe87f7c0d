"""One row of a prompt file: a JSON object on a line, with every fault named by file and line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vime.errors import DataError

__all__ = ["Row", "check_value", "parse_json", "parse_row"]

MAX_DEPTH = 100  # of nested lists and objects; what works on rows later (copies, templates) is recursive


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a prompt file."""

    file: str
    line: int  # from 1; of a table the row
    data: dict[str, Any]
    unit: str = "line"

    @property
    def where(self) -> str:
        """file:line, as editors understand it; of a table its row."""
        return f"{self.file}:{self.line}" if self.unit == "line" else f"{self.file} {self.unit} {self.line}"

    def column(self, key: str, *, flag: str, what: str) -> Any:
        """The value under `key`, checked by `check_value`; a DataError that lists the keys there are when it is missing."""
        if key not in self.data:
            raise DataError(
                f"{self.where}: no column '{key}' ({what}); the row has {_listed(self.data)}. Name the right column with {flag}."
            )
        value = self.data[key]
        check_value(value, self.where, f"column '{key}'")
        return value


def parse_json(text: str, where: str, what: str) -> Any:
    """The value that `text` is the JSON of; `where` (file:line) and `what` begin the message.

    Raises:
        DataError: it is not JSON, nested too deep for Python's reader, or holds a number of thousands of digits.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: {what} is not valid JSON ({error.msg} at column {error.colno}): {_shown(text)}. "
            "It must be one complete JSON value; mend or remove it."
        ) from error
    except RecursionError as error:
        raise _too_deep(where, what) from error
    except ValueError as error:  # a whole number longer than Python converts
        raise DataError(f"{where}: {what} holds a number that cannot be read ({error}): {_shown(text)}. Write it as a string.") from error


def check_value(value: Any, where: str, what: str) -> None:
    """Refuse (DataError) a value nested deeper than MAX_DEPTH or with half of a surrogate pair in a text: copying, rendering,
    encoding or sending it would end the run later."""
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise _too_deep(where, what)
        if isinstance(item, str):
            _check_text(item, where, what)
        elif isinstance(item, dict):
            stack += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list):
            stack += [(part, depth + 1) for part in item]


def _check_text(text: str, where: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        raise DataError(
            f"{where}: {what} holds {code}, half of a surrogate pair, which is no character: "
            f"{text[max(error.start - 20, 0) : error.start + 20]!a}. Mend or remove it; an emoji cut in two looks so."
        ) from error


def _too_deep(where: str, what: str) -> DataError:
    return DataError(f"{where}: {what} is nested too deep (at most {MAX_DEPTH} lists and objects in one another). Flatten or remove it.")


def parse_row(path: str, number: int, raw: bytes) -> Row:
    """Line `number` of the file.

    Raises:
        DataError: it is not UTF-8 or not a JSON object; the message names file:line, the offending text and the cure.
    """
    try:
        line = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{number}: the line is not UTF-8 text (byte 0x{raw[error.start]:02x} at column {error.start + 1}: {error.reason}). "
            "Re-encode the file, e.g. with iconv."
        ) from error
    data = parse_json(line, f"{path}:{number}", "the line")
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
