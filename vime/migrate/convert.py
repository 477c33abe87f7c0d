"""From a script to our command and the notes on the way."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vime.migrate.expand import Item
from vime.migrate.fit import fit
from vime.migrate.flags import Flag, translate
from vime.migrate.megatron import MegatronFlags
from vime.migrate.notes import Note
from vime.migrate.script import REMOTE, Script
from vime.migrate.tables import DROPPED_VARIABLES
from vime.migrate.values import Reference, Value, literal
from vime.migrate.write import Command

__all__ = ["convert"]


def convert(script: Script, *, megatron: MegatronFlags | None, device: str) -> tuple[Command, list[Note]]:
    """Our command for a launch script, and the notes for its report."""
    assert script.launch is not None
    here = Path(script.path).resolve().parent
    out = translate(script.launch.items, megatron=megatron, folders=(Path.cwd(), here, here.parent))
    fit(out, program=script.launch.program, device=device, megatron=megatron)
    environment, notes = _environment(script)
    command = Command(
        source=script.path,
        flags=out.flags,
        environment=environment | out.environment,
        unset=script.unset,
        folder=script.folder.value if script.folder is not None else None,
        passes_arguments=out.passes_arguments,
    )
    notes = [*script.notes, *notes, *out.notes, *_computed(command)]
    if command.environment and _spans_machines(script, out.flags):
        why = "when RAY_ADDRESS names a cluster that is up, its processes do not inherit these: set them where its Ray is started."
        notes.append(Note(kind="could not", place="", what=f"export {', '.join(command.environment)}", why=why))
    return command, notes


def _spans_machines(script: Script, flags: Sequence[Flag]) -> bool:
    """Whether the script starts something on other machines, or asks for several nodes."""
    nodes = [flag.values[0].usual for flag in flags if flag.name == "--actor-num-nodes" and flag.values]
    return any(note.what in REMOTE for note in script.notes) or nodes not in ([], ["1"])


def _environment(script: Script) -> tuple[dict[str, Item], list[Note]]:
    """The variables that are carried over, and what is said of the others."""
    kept: dict[str, Item] = {}
    notes = []
    for name, item in script.environment.items():
        what = f"{name}={item.value.shown}"
        why = next((why for key, why in DROPPED_VARIABLES.items() if _matches(name, key)), None)
        if why is not None:
            notes.append(Note(kind="dropped", place=item.place, what=what, why=why))
        elif name == "NCCL_NVLS_ENABLE" and item.value.exact is None:
            notes.append(Note(kind="dropped", place=item.place, what=what, why="NCCL finds out by itself what the links can do."))
        elif name == "PYTHONPATH":
            value = _without_megatron(item.value)
            if value != item.value:
                why = "Megatron-Core is installed with vime."
                new = f"PYTHONPATH={value.shown}" if value.pieces else None
                notes.append(Note(kind="changed" if new else "dropped", place=item.place, what=what, why=why, new=new))
            kept |= {name: replace(item, value=value)} if value.pieces else {}
        elif "${" in (item.value.exact or ""):
            why = "it stands in single quotes, where bash fills nothing in: write the value in run.sh."
            notes.append(Note(kind="could not", place=item.place, what=what, why=why))
        else:
            kept[name] = item
    return kept, notes


def _matches(name: str, key: str) -> bool:
    return name.startswith(key[:-1]) if key.endswith("*") else name == key


def _without_megatron(value: Value) -> Value:
    """A search path without Megatron's folder; the variable's own old value alone is nothing new, either."""
    entries: list[list[str | Reference]] = [[]]
    for piece in value.pieces:
        if not isinstance(piece, str):
            entries[-1].append(piece)  # type: ignore[arg-type]
            continue
        first, *rest = piece.split(":")
        entries[-1].append(first)
        entries += [[text] for text in rest]
    kept = [Value.of(entry) for entry in entries if not any(isinstance(p, str) and re.search("megatron", p, re.IGNORECASE) for p in entry)]
    kept = [entry for entry in kept if entry.pieces]
    if all(isinstance(entry.pieces[0], Reference) and entry.pieces[0].name == "PYTHONPATH" for entry in kept):
        return Value(())
    joined = [piece for entry in kept for piece in (*literal(":").pieces, *entry.pieces)][1:]
    return Value.of(joined)


def _computed(command: Command) -> list[Note]:
    """Variables that the script computes: run.sh asks for them."""
    return [
        Note(kind="could not", place="", what="${" + name + "}", why=f"{ref.why}: set it before you start run.sh.")
        for name, ref in command.references.items()
        if ref.why is not None
    ]
