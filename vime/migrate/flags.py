"""A launch script's flags as ours: kept, spelled otherwise, dropped with the reason, or left to a person."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vime.config.fields import FlagSpec
from vime.config.parse import flag_table
from vime.config.renamed import GONE, GONE_PREFIXES, RENAMED
from vime.migrate import tables
from vime.migrate.expand import ARGUMENTS, Item
from vime.migrate.hooks import imports_of, new_path
from vime.migrate.megatron import MegatronFlags
from vime.migrate.notes import Note
from vime.migrate.values import Reference, Value, literal

__all__ = ["Flag", "Translation", "flags_of", "translate"]

_REPEATABLE = ("--rollout-sample-hook-path",)
_NOT_KNOWN = "neither slime nor Vime nor Megatron has such a flag; slime ignores what it does not know. Check the spelling."
_CONVERT = "`vime convert --to hf CHECKPOINT OUT --hf-checkpoint MODEL`"
_HF_FOLDER = "vime loads Hugging Face folders and its own commits only"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag with its values."""

    name: str
    values: tuple[Value, ...]
    place: str
    group: str | None = None
    pending: bool = False  # not available yet

    @property
    def shown(self) -> str:
        """For messages."""
        return " ".join([self.name, *(value.shown for value in self.values)])

    @property
    def texts(self) -> list[str] | None:
        """The values with defaults filled in; None when the environment must give one."""
        texts = [value.usual for value in self.values]
        return None if None in texts else [text for text in texts if text is not None]


@dataclass(slots=True)
class Translation:
    """Our command's flags, and what is to be said about the way to them."""

    flags: list[Flag] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    environment: dict[str, Item] = field(default_factory=dict)  # variables that take a flag's place
    unread: set[str] = field(default_factory=set)  # flags of ours that are given, with a value that is not known here
    passes_arguments: bool = False  # the script hands its own arguments on


def flags_of(items: Iterable[Item]) -> tuple[list[Flag], list[Note], bool]:
    """(the flags of a command's words, what is no flag, whether the script's own arguments are handed on)."""
    flags: list[Flag] = []
    notes: list[Note] = []
    arguments = False
    for item in items:
        head = item.value.pieces[0] if item.value.pieces else ""
        if ARGUMENTS in item.value.pieces:
            arguments = True
        elif isinstance(head, str) and head.startswith("--"):
            name, equals, rest = head.partition("=")
            value = (Value.of([rest, *item.value.pieces[1:]]),) if equals else ()
            flags.append(Flag(name, value, item.place, item.group))
        elif flags and item.value.pieces != ("\\",):
            flags[-1] = replace(flags[-1], values=(*flags[-1].values, item.value))
        else:
            notes.append(Note(kind="could not", place=item.place, what=item.value.shown, why="it belongs to no flag."))
    return flags, notes, arguments


def translate(items: Iterable[Item], *, megatron: MegatronFlags | None, folders: Sequence[Path] = ()) -> Translation:
    """Translate the words after train.py.

    `megatron`: None when Megatron is not installed; its flags are kept then, unchecked. `folders`: where users' modules may lie.
    """
    flags, notes, arguments = flags_of(items)
    out = Translation(notes=notes, passes_arguments=arguments)
    _Translator(out, flags, megatron, folders).run()
    return out


class _Translator:
    def __init__(self, out: Translation, flags: Sequence[Flag], megatron: MegatronFlags | None, folders: Sequence[Path]) -> None:
        self._out, self._megatron, self._folders = out, megatron, folders
        self._table = {flag: spec for flag, (_, spec) in flag_table().items()}
        self._flags = self._last_of_each(flags)
        self._given = {flag.name: flag for flag in self._flags}
        self._special: dict[str, Callable[[Flag], None]] = {
            "--load": self._load,
            "--ref-load": self._ref_load,
            "--wandb-key": self._wandb_key,
        }

    def run(self) -> None:
        for flag in self._flags:
            self._special.get(flag.name, self._translate)(flag)

    def _last_of_each(self, flags: Sequence[Flag]) -> list[Flag]:
        """argparse takes the last of several; ours refuses to guess."""
        last = {flag.name: number for number, flag in enumerate(flags)}
        kept = []
        for number, flag in enumerate(flags):
            if last[flag.name] == number:
                together = tuple(value for each in flags if each.name == flag.name for value in each.values)
                merged = replace(flag, values=together) if flag.name in _REPEATABLE else flag
                if merged != flag:
                    self._note("changed", flag, "one flag takes all of them.", new=merged.shown)
                kept.append(merged)
            elif flag.name in _REPEATABLE:
                continue
            elif flag.values != flags[last[flag.name]].values:
                self._note("dropped", flag, f"it is given again ({flags[last[flag.name]].place}), and the last one counts.")
        return kept

    def _note(self, kind: str, flag: Flag, why: str, *, new: str | None = None) -> None:
        self._out.notes.append(Note(kind=kind, place=flag.place, what=flag.shown, why=why, new=new))

    def _change(self, flag: Flag, new: Flag, why: str) -> None:
        """Put `new` in the place of `flag`, unless its name stands in the script, too."""
        other = self._given.get(new.name)
        if other is not None and other.name != flag.name:
            if other.values == new.values:
                self._note("dropped", flag, f"it is {new.name} here, which is given, too.")
            else:
                self._note("could not", flag, f"it is {new.name} here, which is given as {other.shown}: decide which counts.")
            return
        if not any(value.opaque for value in new.values):
            self._note("changed", flag, why, new=new.shown)
        self._keep(new)

    def _translate(self, flag: Flag) -> None:
        """The tables, in the order of who owns a name."""
        name = flag.name
        if name in tables.EXPANDED:
            self._expand(flag)
        elif name in RENAMED:
            new = replace(flag, name=RENAMED[name], values=self._values(flag))
            if name.startswith("--sglang-") and not flag.values and new.name.startswith("--no-"):
                new = replace(new, values=())
            self._change(flag, new, tables.RENAMED_WHY.get(name, "it is spelled so here."))
        elif name in tables.SGLANG_DROPPED:
            self._note("dropped", flag, tables.SGLANG_DROPPED[name])
        elif name in tables.SAY:
            self._note("could not", flag, tables.SAY[name])
        elif name.startswith("--sglang-speculative-"):
            self._note("could not", flag, self._speculation())
        elif name in GONE:
            self._note("could not" if name in tables.BY_HAND else "dropped", flag, GONE[name])
        elif name in self._table:
            self._own(flag, self._table[name])
        elif name.startswith(("--vllm-", "--no-vllm-", "--router-")):
            self._engine(flag)
        elif prefix := next((prefix for prefix in GONE_PREFIXES if name.startswith(prefix)), None):
            self._note("could not", flag, GONE_PREFIXES[prefix])
        else:
            self._megatrons(flag)

    def _expand(self, flag: Flag) -> None:
        """One flag of theirs that is others here, and without a value."""
        if [value.exact for value in flag.values] == ["1"]:
            self._note("dropped", flag, "1 is what is done without it.")
            return
        names, why = tables.EXPANDED[flag.name]
        for name in names:
            self._change(flag, replace(flag, name=name, values=()), why)

    def _speculation(self) -> str:
        """What to say instead of SGLang's flags of speculative decoding."""
        steps = self._given.get("--sglang-speculative-num-steps")
        tokens = (steps.texts or ["N"])[0] if steps is not None and steps.values else "N"
        draft = "--sglang-speculative-draft-model-path" in self._given
        method = '"method": "eagle3", "model": "DRAFT"' if draft else '"method": "mtp"'
        return f"say --vllm-speculative-config '{{{method}, \"num_speculative_tokens\": {tokens}}}', if the model has such a head or draft."

    def _values(self, flag: Flag) -> tuple[Value, ...]:
        """The flag's values under their names here."""
        names = tables.VALUES.get(flag.name, {})
        return tuple(literal(names[value.exact]) if value.exact in names else value for value in flag.values)

    def _keep(self, flag: Flag) -> None:
        """Into our command, whoever owns it."""
        if any(value.opaque for value in flag.values):
            self._note("could not", flag, "its value is what a command prints, or an expansion that is not read: write the value itself.")
            self._out.unread.add(flag.name)
        else:
            self._out.flags.append(flag)

    def _own(self, flag: Flag, spec: FlagSpec) -> None:
        """A flag of ours: its surplus values and its paths into slime are looked at."""
        most = 0 if spec.type is bool and not spec.many else 1
        surplus = () if spec.many else flag.values[most:]
        for value in surplus:
            if not any(isinstance(piece, Reference) for piece in value.pieces):
                break
            self._out.notes.append(
                Note(
                    kind="could not",
                    place=flag.place,
                    what=value.shown,
                    why="what the environment may add here is not known.",
                )
            )
        else:
            flag = replace(flag, values=flag.values[:most]) if surplus else flag
        if not flag.name.endswith(("-path", "-paths")):
            self._keep_values(flag)
        else:
            self._function(flag)

    def _keep_values(self, flag: Flag) -> None:
        """The flag as it is, but for values that have other names here."""
        changed = replace(flag, values=self._values(flag))
        if changed != flag:
            self._change(flag, changed, "the value is spelled so here.")
        else:
            self._keep(flag)

    def _function(self, flag: Flag) -> None:
        """A flag that names functions: those of slime's and Vime's are looked for here, the user's own for imports to be changed."""
        old = [value.exact or "" for value in flag.values]
        new = [new_path(path) for path in old]
        if None in new:
            self._note("could not", flag, "there is no such function here: see docs/hooks.md for those that there are, or bring your own.")
        elif new != old:
            self._change(flag, replace(flag, values=tuple(literal(path or "") for path in new)), "the function's place here.")
        else:
            self._out.notes += [note for path in old for note in imports_of(path, self._folders)]
            self._keep(flag)

    def _engine(self, flag: Flag) -> None:
        """--vllm-X and --router-X: what vime sets itself is refused."""
        from vime.backends.vllm_utils.arguments import OWNED_ROUTER, OWNED_VLLM

        owned, prefix = (OWNED_ROUTER, "--router-") if flag.name.startswith("--router-") else (OWNED_VLLM, "--vllm-")
        theirs = "--" + flag.name.removeprefix("--no-vllm-" if flag.name.startswith("--no-vllm-") else prefix)
        if theirs not in owned:
            self._keep_values(flag)
            return
        instead = owned[theirs]
        if instead in self._table and len(flag.values) == 1:
            self._change(flag, replace(flag, name=instead), tables.RENAMED_WHY.get(flag.name, "vime sets the engine's by this flag."))
        else:
            self._note("dropped", flag, f"vime sets it itself{f': use {instead}' if instead else ''}.")

    def _megatrons(self, flag: Flag) -> None:
        if self._megatron is None:
            self._note("could not", flag, "Megatron is not installed here, so it is kept as it is: `vime train` will check it.")
            self._out.flags.append(flag)
            return
        if not self._megatron.knows(flag.name):
            self._note("could not", flag, _NOT_KNOWN)
            return
        kind, why = self._megatron.judge(flag.name, flag.values)
        if kind != "kept":
            self._note(kind, flag, why)
        if kind in ("kept", "not yet"):
            self._keep(replace(flag, pending=kind == "not yet"))

    def _same_folder(self, flag: Flag, other: str) -> bool:
        given = self._given.get(other)
        if given is None or len(given.values) != 1 or len(flag.values) != 1:
            return False
        return _folder(flag.values[0]) == _folder(given.values[0])

    def _load(self, flag: Flag) -> None:
        """slime starts from --load when it holds a checkpoint; a run here resumes from --save by itself."""
        if self._same_folder(flag, "--save"):
            self._note("dropped", flag, "a run resumes from its last commit in --save by itself; slime's checkpoints there are not read.")
        elif self._same_folder(flag, "--hf-checkpoint"):
            self._note("dropped", flag, "a run starts from the weights in --hf-checkpoint.")
        elif self._is_converted(flag):
            self._note("dropped", flag, f"{_HF_FOLDER}: a run starts from the weights in --hf-checkpoint.")
        else:
            why = f"{_HF_FOLDER}. Make a Hugging Face folder of its weights ({_CONVERT}), and give that as --hf-checkpoint."
            self._note("could not", flag, why)

    def _ref_load(self, flag: Flag) -> None:
        """A converted checkpoint becomes the folder that it was converted from, when the names say which that is."""
        hf = self._given.get("--hf-checkpoint")
        if not self._is_converted(flag) or len(flag.values) != 1:
            self._keep(flag)
            return
        if hf is not None and len(hf.values) == 1 and _folder(flag.values[0]) == _folder(hf.values[0]) + "_torch_dist":
            self._change(flag, replace(flag, values=hf.values), f"{_HF_FOLDER}; by its name this was converted from --hf-checkpoint.")
        else:
            self._note("could not", flag, f"{_HF_FOLDER}: give the folder that this was made of, or make one ({_CONVERT}).")

    def _is_converted(self, flag: Flag) -> bool:
        return any("torch_dist" in value.shown or re.search(r"iter_\d{7}", value.shown) for value in flag.values)

    def _wandb_key(self, flag: Flag) -> None:
        for value in flag.values[:1]:
            self._out.environment["WANDB_API_KEY"] = Item(value, flag.place)
            self._note(
                "changed", flag, "on the command line everybody on the machine can read it.", new=f"export WANDB_API_KEY={value.shown}"
            )


def _folder(value: Value) -> str:
    return os.path.normpath(value.shown)
