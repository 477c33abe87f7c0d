"""The command that starts the training: `ray job submit ... -- python3 train.py FLAGS`, or python alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from vime.migrate.expand import Item
from vime.migrate.notes import Note
from vime.migrate.values import Piece, Value, literal

__all__ = ["OWN_RAY", "Launch", "find_launch"]

_PROGRAMS = ("train.py", "train_async.py")
_MARK = "\x00{}\x00"  # stands for a variable while JSON is parsed
OWN_RAY = "the run starts a Ray of its own and ends it; to use a cluster that is up, set RAY_ADDRESS."


@dataclass(slots=True)
class Launch:
    """A training command."""

    program: str  # train.py or train_async.py
    items: list[Item]  # its words after the program
    environment: dict[str, Item] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)


def find_launch(items: Sequence[Item], prefix: Sequence[tuple[str, Item]]) -> Launch | None:
    """The launch that a command makes, if it makes one; `prefix` holds the assignments before the command."""
    at = next((i for i, item in enumerate(items) if os.path.basename(item.value.exact or "") in _PROGRAMS), None)
    if at is None or not any(re.search(r"python|\brun\b", item.value.shown, re.IGNORECASE) for item in items[:at]):
        return None
    launch = Launch(os.path.basename(items[at].value.exact or ""), list(items[at + 1 :]), dict(prefix))
    before = list(items[:at])
    while before:
        item = before.pop(0)
        text = item.value.exact or ""
        name, equals, value = _split(item.value)
        if re.fullmatch(r"[A-Za-z_]\w*", name) and equals:  # env A=1 python ...
            launch.environment[name] = Item(value, item.place)
        elif name in ("--runtime-env-json", "--runtime-env", "--working-dir") and (equals or before):
            _runtime_option(launch, name, value if equals else before.pop(0).value, item.place)
        elif text == "ray":
            launch.notes.append(Note(kind="dropped", place=item.place, what="ray job submit", why=OWN_RAY))
    return launch


def _split(value: Value) -> tuple[str, bool, Value]:
    """NAME=value at the first equals sign: (name, whether there is one, the rest)."""
    head = value.pieces[0] if value.pieces and isinstance(value.pieces[0], str) else ""
    name, equals, rest = head.partition("=")
    return name, bool(equals), Value.of([rest, *value.pieces[1:]])


def _runtime_option(launch: Launch, option: str, value: Value, place: str) -> None:
    """Carry the environment of a runtime-env JSON over; say what cannot be."""
    if option == "--working-dir":
        launch.notes.append(Note(kind="could not", place=place, what=f"{option} {value.shown}", why="start run.sh in that folder."))
        return
    try:
        if option != "--runtime-env-json" or value.opaque or not any(isinstance(piece, str) for piece in value.pieces):
            raise ValueError("its text is not in the script")
        data, pieces = _parse(value)
    except ValueError as error:
        why = f"not readable ({error}): carry its env_vars over by hand, as `export NAME=value`."
        launch.notes.append(Note(kind="could not", place=place, what=option, why=why))
        return
    for name, text in data.pop("env_vars", {}).items():
        launch.environment[name] = Item(_with_pieces(str(text), pieces), place)
    for key in data:
        why = "Ray installs nothing for a run of vime: have it in the environment that you start from."
        launch.notes.append(Note(kind="could not", place=place, what=f'"{key}" of {option}', why=why))


def _parse(value: Value) -> tuple[dict[str, dict[str, str]], list[Piece]]:
    """The JSON object, with marks where variables stand, and those variables."""
    text, pieces = "", list[Piece]()
    for piece in value.pieces:
        if isinstance(piece, str):
            text += piece
        else:
            text += _MARK.format(len(pieces))
            pieces.append(piece)
    data = json.loads(text, strict=False)
    if not isinstance(data, dict) or not isinstance(data.get("env_vars", {}), dict):
        raise ValueError("no JSON object with env_vars")
    return data, pieces


def _with_pieces(text: str, pieces: Sequence[Piece]) -> Value:
    """`text` with its marks replaced by the variables that they stand for."""
    parts = re.split(r"\x00(\d+)\x00", text)
    return Value.of(piece for i, part in enumerate(parts) for piece in ([pieces[int(part)]] if i % 2 else literal(part).pieces))
