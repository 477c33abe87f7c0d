"""Our command as run.sh or run.yaml, and the report."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from vime.migrate.expand import Item
from vime.migrate.flags import Flag
from vime.migrate.notes import KINDS, Note
from vime.migrate.values import Reference, Value

__all__ = ["Command", "report", "run_sh", "run_yaml"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Our command, with what it needs around it."""

    source: str  # the script it was made of
    flags: Sequence[Flag]
    environment: Mapping[str, Item] = field(default_factory=dict)
    unset: Sequence[str] = ()
    folder: Value | None = None
    passes_arguments: bool = False
    available_only: bool = False  # flags that are not available yet stand in comments

    @property
    def references(self) -> dict[str, Reference]:
        """The variables without a default that the command needs, by name."""
        values = [value for flag in self.flags for value in flag.values] + [item.value for item in self.environment.values()]
        values += [self.folder] if self.folder is not None else []
        return {ref.name: ref for value in values for ref in value.references if ref.default is None}


def run_sh(command: Command) -> str:
    """A bash script. Variables that the environment must give are asked for at its beginning."""
    lines = ["#!/usr/bin/env bash", f"# Made by `vime migrate {command.source}`: read its report.", "set -euo pipefail", ""]
    for name, ref in sorted(command.references.items()):
        lines.append(f': "${{{name}:?{_quotable(ref.why or "the script takes it from the environment")}}}"')
    lines += [f"cd {command.folder.shell}"] if command.folder is not None else []
    lines += [f"unset {' '.join(command.unset)}"] if command.unset else []
    lines += [f"export {name}={item.value.shell}" for name, item in command.environment.items()]
    lines += [""] if lines[-1] else []
    lines.append("flags=(")
    for group, flags in groupby(command.flags, key=lambda flag: flag.group):
        lines += [f"    # {group}"] if group else []
        for flag in flags:
            text = " ".join([flag.name, *(value.shell for value in flag.values)])
            lines.append(f"    # not available yet: {text}" if flag.pending and command.available_only else f"    {text}")
    lines += [")", 'vime train "${flags[@]}"' + (' "$@"' if command.passes_arguments else ""), ""]
    return "\n".join(lines)


def run_yaml(command: Command) -> tuple[str, list[Note]]:
    """A file for `vime train --config`, and what it cannot hold: variables are filled in with their defaults."""
    lines = [f"# Made by `vime migrate {command.source}`: read its report. Start it with: vime train --config THIS_FILE"]
    notes = []
    for name, item in command.environment.items():
        lines.append(f"# before the start: export {name}={item.value.shell}")
    if command.folder is not None:
        lines.append(f"# before the start: cd {command.folder.shell}")
    if command.passes_arguments:
        notes.append(Note(kind="could not", place="", what='"$@"', why="give further flags behind --config."))
    for group, flags in groupby(command.flags, key=lambda flag: flag.group):
        lines += ["", f"# {group}"] if group else [""]
        for flag in flags:
            key, texts = flag.name.removeprefix("--"), flag.texts
            if texts is None:
                notes.append(
                    Note(kind="could not", place=flag.place, what=flag.shown, why="a file holds no variables: write the value in it.")
                )
                lines.append(f"# {key}: {' '.join(value.shown for value in flag.values)}")
                continue
            if any(value.references for value in flag.values):
                filled = f"{key}: {' '.join(texts)}"
                notes.append(Note(kind="changed", place=flag.place, what=flag.shown, why="the default is filled in.", new=filled))
            text = f"{key}: {_yaml(texts)}"
            lines.append(f"# not available yet: {text}" if flag.pending and command.available_only else text)
    return "\n".join([*lines, ""]), notes


def _yaml(texts: Sequence[str]) -> str:
    if not texts:
        return "true"
    scalars = [_scalar(text) for text in texts]
    return scalars[0] if len(scalars) == 1 else f"[{', '.join(scalars)}]"


def _scalar(text: str) -> str:
    """A number or a plain word as it is; anything else as JSON, which YAML contains."""
    if re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?", text) or (re.fullmatch(r"[A-Za-z/.][\w/.-]*", text) and text.lower() not in _YAML_WORDS):
        return text
    if text.startswith("{"):
        try:
            json.loads(text)
        except ValueError:
            return json.dumps(text)
        return text
    if re.fullmatch(r"-?\d+(\.\d+)?[eE][+-]?\d+", text):
        mantissa, _, exponent = text.lower().partition("e")
        return f"{mantissa}{'' if '.' in mantissa else '.0'}e{int(exponent):+d}"  # YAML 1.1 asks for the point and the sign
    return json.dumps(text)


_YAML_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n", ".nan", ".inf")


def _quotable(text: str) -> str:
    return re.sub(r'([\\$`"}])', r"\\\1", text)


def report(notes: Sequence[Note], width: int = 120) -> str:
    """The notes by kind, those with the same reason together."""
    lines: list[str] = []
    for kind, heading in KINDS.items():
        chosen = [note for note in notes if note.kind == kind]
        if not chosen:
            continue
        lines += [*([""] if lines else []), f"{heading}"]
        reasons = dict.fromkeys(note.why for note in chosen)
        for why in reasons:
            same = [note for note in chosen if note.why == why]
            lines += _wrapped(_entries(same), width, "  ") + _wrapped([_sentence(why)], width, "      ")
    return "\n".join([*lines, ""])


def _sentence(why: str) -> str:
    """With a capital letter, but for names that have none."""
    return why if why.startswith(("vime ", "slime ", "vLLM")) else why[:1].upper() + why[1:]


def _entries(notes: Sequence[Note]) -> Iterator[str]:
    """Notes with one reason: the lines of each file, then what stands there and what it became."""
    for label, group in groupby(notes, key=lambda note: re.sub(r"(?:line \d+)?$", "", note.place)):
        same = list(group)
        numbers = [int(note.place.rpartition(" ")[2]) for note in same if note.place]
        parts = dict.fromkeys(note.what + (f" -> {note.new}" if note.new else "") for note in same)
        yield (f"{label}{_lines(numbers)}: " if numbers else "") + ", ".join(parts)


def _lines(numbers: Sequence[int]) -> str:
    """ "line 3", "lines 3-5" or "lines 3, 5"."""
    chosen = sorted(set(numbers))
    runs: list[list[int]] = []
    for number in chosen:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"line{'s' * (len(chosen) > 1)} {text}"


def _wrapped(texts: Iterator[str] | Sequence[str], width: int, indent: str) -> list[str]:
    """Texts one after another, separated by semicolons, in lines of at most `width` characters."""
    lines, line = [], indent
    words = "; ".join(texts).split(" ")
    for word in words:
        if len(line) + len(word) + 1 > width and line.strip():
            lines.append(line.rstrip())
            line = indent + "  "
        line += word + " "
    return [*lines, line.rstrip()]
