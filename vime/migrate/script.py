"""Reads a launch script without running it: variables, arrays, sourced files, and the command that starts the training."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vime.errors import ConfigError
from vime.migrate.commands import Block, Command, commands_of
from vime.migrate.expand import Item, Variables
from vime.migrate.launch import OWN_RAY, Launch, find_launch
from vime.migrate.lexer import Array, Text, Word, tokens_of
from vime.migrate.notes import Note
from vime.migrate.values import Value, literal

__all__ = ["REMOTE", "Script", "read_script"]

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<index>\[[^\]]*\])?(?P<append>\+?)=", re.DOTALL)
_DECLARING = ("export", "declare", "typeset", "local", "readonly")
_QUIET = (
    "echo set sleep wait true false : [ [[ test exit return shopt trap break continue command grep awk cat tee tail head seq clear "
    "printf date let shift"
).split()
REMOTE = ("ssh", "pdsh", "mpirun", "srun", "parallel-ssh")
_ENDS = "vime ends every process of a run, whatever happens; pkill would end other people's, too."
_NODES = "start Ray on the other machines by your own means, and set RAY_ADDRESS in run.sh."
_DROPPED = {  # command -> why nothing takes its place
    **dict.fromkeys(("pkill", "kill", "killall", "fuser"), _ENDS),
    "ray": OWN_RAY,
    **dict.fromkeys(REMOTE, _NODES),
    "mkdir": "vime makes the folders that it writes to.",
    "ulimit": "vime raises the limit of open files itself.",
    "nvidia-smi": "it prints, or counts devices.",
}
_MAX_DEPTH = 8  # of files that source one another


@dataclass(slots=True)
class Script:
    """What a launch script says."""

    path: str
    launch: Launch | None = None
    environment: dict[str, Item] = field(default_factory=dict)  # what the training's processes get, by name
    unset: list[str] = field(default_factory=list)  # variables taken out of the environment
    folder: Item | None = None  # where the launch is made, when the script changes there
    notes: list[Note] = field(default_factory=list)


def read_script(path: str) -> Script:
    """Read `path`. Raises ConfigError when it cannot be read, is no shell script, or starts no training."""
    reader = _Reader(path)
    try:
        reader.read(path)
    except RecursionError:
        raise ConfigError(f"{path}: something in it is nested too deeply to be read: write it flat.") from None
    if reader.script.launch is None:
        raise ConfigError(
            f"{path}: no command that runs train.py or train_async.py was found. Give the script whose last lines start the training."
        )
    return reader.finish()


def _source_of(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}' cannot be read ({error}): give a bash script.") from error
    first = text.partition("\n")[0]
    if path.endswith(".py") or (first.startswith("#!") and "sh" not in first):
        raise ConfigError(f"'{path}' is no shell script: give the bash script that starts the training.")
    return text


class _Reader:
    def __init__(self, path: str) -> None:
        self.script = Script(path)
        self._variables = Variables(path)
        self._exported: dict[str, str] = {}  # name -> place
        self._depth = 0
        self._label = ""  # of the file being read, in places
        self._ends: list[tuple[Command, str]] = []

    def read(self, path: str) -> None:
        """Read one file; those that it sources are read in turn."""
        for command in commands_of(tokens_of(_source_of(path), path)):
            self._variables.place = self._place(command.line)
            if command.loop_variable is not None:
                self._variables.forget(command.loop_variable, f"set by the loop of {self._variables.place}")
            elif command.words:
                self._command(command)

    def finish(self) -> Script:
        """The script, with what is known only at its end."""
        variables, launch = self._variables, self.script.launch
        assert launch is not None
        for name, place in self._exported.items():
            value = variables.scalars.get(name)
            if value is not None and name not in self.script.environment:
                self.script.environment[name] = Item(value, place)
        for name, place in variables.unset_arrays.items():
            self._note("dropped", place, "${" + name + "[@]}", "nothing in the script sets this array, so it is empty there, too.")
        for item in dict.fromkeys(variables.kept_whole):
            self._note("changed", item.place, item.value.shown, "kept as one value; without quotes bash would have cut it at its blanks.")
        return self.script

    def _place(self, line: int) -> str:
        return f"{self._label}line {line}"

    def _note(self, kind: str, place: str, what: str, why: str) -> None:
        self.script.notes.append(Note(kind=kind, place=place, what=what, why=why))

    def _inside(self, block: Block) -> str:
        lines = f"line {block.line}" if block.end in (0, block.line) else f"lines {block.line}-{block.end}"
        return f"the {'condition' if block.kind in ('&&', '||') else repr(block.kind)} of {self._label}{lines}"

    def _command(self, command: Command) -> None:
        """Assignments, then a command or none."""
        words = list(command.words)
        prefix = []
        while words and (isinstance(words[0], Array) or _assigned(words[0]) is not None):
            prefix.append(words.pop(0))
        if not words:
            for each in prefix:
                self._assign(each, command.block)
            return
        first = words[0]
        name = first.literal if isinstance(first, Word) else None
        if name in _DECLARING:
            self._declare(words[1:], command.block, exported=name == "export" or _has_option(words, "x"))
            return
        expanded = [item for word in words for item in self._words(word)]
        self._variables.place = self._place(command.line)
        launch = find_launch(expanded, [self._prefix(word) for word in prefix if isinstance(word, Word)])
        if launch is not None:
            self._launch(launch, command)
        elif name in ("source", ".") and len(words) > 1:
            self._source(expanded[1].value if len(expanded) > 1 else Value(()), command)
        elif name in ("printf", "read", "mapfile", "readarray"):
            self._sets(name, words)
        elif name == "unset":
            self.script.unset += [item.value.exact for item in expanded[1:] if item.value.exact and item.value.exact.isidentifier()]
        elif name == "cd" and len(expanded) > 1 and command.block is None:
            self._cd(expanded[1])
        else:
            self._other(name or "", expanded, command)

    def _cd(self, item: Item) -> None:
        path = os.path.normpath(item.value.exact) if item.value.exact else None
        self.script.folder = item if path is None else None if path == "." else replace(item, value=literal(path))

    def _words(self, word: Word | Array) -> list[Item]:
        self._variables.place = self._place(word.line)
        return [] if isinstance(word, Array) else self._variables.words(word)

    def _prefix(self, word: Word) -> tuple[str, Item]:
        name, _, value = self._right_side(word)
        return name, Item(value, self._variables.place)

    def _right_side(self, word: Word) -> tuple[str, bool, Value]:
        """(name, whether it is +=, value) of an assigning word."""
        match = _assigned(word)
        assert match is not None
        head = word.parts[0]
        assert isinstance(head, Text)
        rest = (Text(head.text[match.end() :], head.quoted), *word.parts[1:])
        return match["name"], bool(match["append"]), self._variables.value(replace(word, parts=rest))

    def _assign(self, word: Word | Array, block: Block | None) -> None:
        if isinstance(word, Array):
            self._assign_array(word, block)
            return
        name, append, value = self._right_side(word)
        match = _assigned(word)
        if block is not None:
            self._variables.forget(name, f"set inside {self._inside(block)}")
        elif match is not None and match["index"]:
            self._variables.forget(name, f"set element by element ({self._variables.place})")
        elif value.opaque:
            self._variables.forget(name, f"computed by {value.shown} ({self._variables.place})")
        else:
            self._variables.assign(name, value, append=append)

    def _assign_array(self, array: Array, block: Block | None) -> None:
        if block is None:
            self._variables.assign_array(array, self._label + "line {}")
            return
        items = [item.value.shown for word in array.words for item in self._variables.words(word)]
        if any(item.startswith("--") for item in items):
            self._note(
                "could not",
                self._variables.place,
                f"{array.name}{'+=' if array.append else '='}({' '.join(items)})",
                f"it stands inside {self._inside(block)}: add these flags when they apply to you.",
            )
        self._variables.arrays.setdefault(array.name, [])

    def _declare(self, words: Sequence[Word | Array], block: Block | None, *, exported: bool) -> None:
        for word in words:
            if isinstance(word, Array):
                self._assign(word, block)
                continue
            match = _assigned(word)
            name = match["name"] if match is not None else word.literal
            if match is not None:
                self._assign(word, block)
            if exported and name is not None and name.isidentifier():
                self._exported[name] = self._variables.place

    def _sets(self, name: str, words: Sequence[Word | Array]) -> None:
        """printf -v NAME, read NAME ...: what they set is not followed."""
        names = [word.literal for word in words[1:] if isinstance(word, Word) and word.literal is not None]
        if name == "printf":
            names = names[1:2] if names[:1] == ["-v"] else []
        for each in names:
            if each.isidentifier():
                self._variables.forget(each, f"computed by {name} ({self._variables.place})")

    def _source(self, value: Value, command: Command) -> None:
        """Read a sourced file in place."""
        path = self._find(value.usual or "")
        if path is None or command.block is not None or self._depth >= _MAX_DEPTH:
            why = (
                f"it stands inside {self._inside(command.block)}."
                if command.block is not None
                else "this file is not there, or its name is not known: what it sets is missing here."
            )
            self._note("could not", self._variables.place, f"source {value.shown}", why)
            return
        keep = self._label, self._variables.file, self._variables.place
        self._label, self._variables.file = f"{os.path.basename(path)} ", path
        self._depth += 1
        self.read(path)
        self._depth -= 1
        self._label, self._variables.file, self._variables.place = keep

    def _find(self, path: str) -> str | None:
        """A sourced file: as given, beside the script, or one folder up (scripts are started from the repository's root)."""
        beside = Path(self.script.path).parent
        folder = Path((self.script.folder.value.usual if self.script.folder is not None else None) or ".")
        candidates = [folder / path, Path(path), beside / path, beside / ".." / path] if path else []
        return next((str(candidate) for candidate in candidates if candidate.is_file()), None)

    def _launch(self, launch: Launch, command: Command) -> None:
        place = self._variables.place
        if self.script.launch is not None:
            self._note("could not", place, "a second launch", "one command is made of the first: move this one into a script of its own.")
            return
        if command.block is not None and command.block.kind != "function":
            self._note("could not", place, "the launch", f"it stands inside {self._inside(command.block)}: it is taken as if it ran once.")
        self.script.launch = launch
        self.script.environment |= launch.environment
        self.script.notes += [replace(note, place=place) for note in launch.notes]

    def _other(self, name: str, items: Sequence[Item], command: Command) -> None:
        shown = " ".join(item.value.shown for item in items)
        if name in _QUIET or command.piped or command.decides:
            return
        if name in _DROPPED:
            self._note("dropped", self._variables.place, name if name != "ray" else " ".join(shown.split()[:2]), _DROPPED[name])
            return
        where = f" (inside {self._inside(command.block)})" if command.block is not None else ""
        self._note(
            "could not", self._variables.place, _short(shown), f"this command is not carried over{where}: run it by hand if you need it."
        )


def _assigned(word: Word | Array) -> re.Match[str] | None:
    """The match of NAME= or NAME+= at a word's beginning."""
    head = word.parts[0] if isinstance(word, Word) and word.parts else None
    return _ASSIGNMENT.match(head.text) if isinstance(head, Text) and not head.quoted else None


def _has_option(words: Sequence[Word | Array], letter: str) -> bool:
    return any(isinstance(word, Word) and (word.literal or "").startswith("-") and letter in (word.literal or "") for word in words[1:])


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."
