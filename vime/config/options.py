"""The options of an owner's argparse parser: described as plain data, and every mistake in its tokens found, not the first one alone.

What an owner's option is called is remembered in the user's cache folder, for suggestions, help and completion only;
whether a command line is right is always asked of the parser itself.
"""

from __future__ import annotations

import argparse
import enum
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["UNKNOWN", "Option", "cache_folder", "describe", "groups", "load_options", "parse_all", "store_options"]

UNKNOWN = "unknown flag "  # opens each problem with an unknown flag; the driver adds the nearest names


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of an owner."""

    flags: tuple[str, ...]  # as the owner spells them, long ones only
    group: str
    takes: str  # "" for a switch, else what follows: "INT", "{a,b}", "TEXT ..."
    default: str  # "" for none
    help: str
    note: str = ""  # why it cannot be given here, and what to use instead

    @classmethod
    def of(cls, row: dict[str, Any]) -> Option:
        """From JSON."""
        return cls(**{**row, "flags": tuple(row["flags"])})


class _RefusedError(Exception):
    """What a parser objects to."""


def parse_all(parser: argparse.ArgumentParser, tokens: Sequence[str], *, underscores: bool = False) -> tuple[dict[str, Any], list[str]]:
    """(destination -> value of what parses, a problem for each flag that does not).

    Each flag is parsed by itself, with the defaults left out; when all are well, they are parsed together. `underscores`:
    the parser takes them for dashes in names. The parser is changed: it knows no abbreviations, no defaults and no
    positional arguments (one value too many is none), and it raises instead of ending the process.
    """
    _tame(parser)
    known: dict[str, Any] = {}
    problems: list[str] = []
    texts: dict[str, list[str]] = {}
    for words in groups(tokens):
        flag = words[0].partition("=")[0]
        name = flag.partition(".")[0]  # the rest is the key of a dotted JSON flag
        name = name.replace("_", "-") if underscores else name
        action = parser._option_string_actions.get(name)
        if action is None:
            problems.append(f"{UNKNOWN}{flag}.")
            continue
        found, refused = _parse(parser, words, f"{name}: ")
        problems += refused
        first = texts.setdefault(action.dest + flag[len(name) :], words)
        if first != words and not isinstance(action, argparse._AppendAction):
            problems.append(f"{flag} is given twice, as '{' '.join(first)}' and '{' '.join(words)}': keep one.")
        known |= found
    return (known, problems) if problems else _parse(parser, list(tokens), "")


def _parse(parser: argparse.ArgumentParser, words: list[str], opening: str) -> tuple[dict[str, Any], list[str]]:
    """(what the words set, what the parser objects to)."""
    try:
        return vars(parser.parse_args(words)), []
    except (_RefusedError, ValueError, TypeError) as error:
        message = str(error)
        return {}, [re.sub(r"^unrecognized arguments: (.*)", rf"{opening}'\1' is more than it takes.", message)]


def _tame(parser: argparse.ArgumentParser) -> None:
    def refuse(message: str) -> NoReturn:
        raise _RefusedError(message)

    parser.error = refuse  # type: ignore[method-assign]
    parser.allow_abbrev = False
    for action in list(parser._actions):
        action.default = argparse.SUPPRESS
        if not action.option_strings:
            parser._remove_action(action)


def groups(tokens: Sequence[str]) -> list[list[str]]:
    """The tokens, one list for each flag with its values."""
    groups: list[list[str]] = []
    for token in tokens:
        if token.startswith("--") or not groups:
            groups.append([token])
        else:
            groups[-1].append(token)
    return groups


def describe(parser: argparse.ArgumentParser, notes: Mapping[str, str]) -> list[Option]:
    """The parser's options; `notes`: option -> why it cannot be given."""
    groups = {id(action): group.title or "" for group in parser._action_groups for action in group._group_actions}
    options = []
    for action in parser._actions:
        flags = tuple(name for name in action.option_strings if name.startswith("--"))
        if not flags or action.help is argparse.SUPPRESS:
            continue
        default = action.default
        shown = "" if default in (None, argparse.SUPPRESS, [], {}) or action.nargs == 0 else _word(default)
        options.append(
            Option(
                flags=flags,
                group=groups.get(id(action), ""),
                takes=_takes(action),
                default=shown[:80],
                help=" ".join((action.help or "").replace("%(default)s", shown).replace("%%", "%").split()),
                note=next((notes[name] for name in flags if name in notes), ""),
            )
        )
    return options


def _takes(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        word = "{" + ",".join(map(_word, action.choices)) + "}"
    else:
        word = {int: "INT", float: "FLOAT"}.get(action.type, "TEXT")  # type: ignore[call-overload]
    return f"{word} ..." if action.nargs in ("*", "+") or isinstance(action.nargs, int) else word


def _word(value: object) -> str:
    """As it is typed: of an enumeration the text that stands for a member, else the member's name."""
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, str) else value.name
    return str(value)


def cache_folder() -> Path:
    """Where this user's caches lie."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vime"


def load_options(owner: str, key: str) -> list[Option] | None:
    """The remembered options of an owner; None when there are none of this `key` (the state of its files)."""
    try:
        data = json.loads(_file(owner).read_text(encoding="utf-8"))
        if data["key"] != key:
            return None
        return [Option.of(row) for row in data["options"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none, or a torn one


def store_options(owner: str, key: str, options: Iterable[Option]) -> None:
    """Remember the options of an owner. A cache that cannot be written is no error."""
    path = _file(owner)
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps({"key": key, "options": [asdict(option) for option in options]}), encoding="utf-8")
        draft.replace(path)
    except OSError:
        return


def _file(owner: str) -> Path:
    return cache_folder() / f"{owner}_options.json"
