"""Makes the translated flags fit together: defaults that differ are written out, what has no effect here is dropped."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vime.config import RunConfig
from vime.config.availability import not_available
from vime.config.parse import OwnValues, flag_table, parse_own
from vime.config.renamed import CHANGED
from vime.config.rules import check_rules
from vime.config.sources import flags_in
from vime.errors import ConfigError
from vime.migrate.flags import Flag, Translation
from vime.migrate.megatron import MegatronFlags
from vime.migrate.notes import Note
from vime.migrate.tables import DEFAULTS, DIFFERS
from vime.migrate.values import literal

__all__ = ["fit"]

_NO_EFFECT = re.compile(r"(?P<flags>--[\w-]+(?: \S+)?(?:, --[\w-]+)*) ha(?:s|ve) no effect (?P<why>.*)")
_ENGINES, _ROUTER = ("--vllm-", "--no-vllm-"), "--router-"
_GIVEN_UP = 20  # rounds of dropping; each drops at least one flag


def fit(out: Translation, *, program: str, device: str, megatron: MegatronFlags | None) -> None:
    """Add, drop and complain, until our own rules take the flags as far as they are known. Changes `out`."""
    _Fitter(out, megatron).run(program, device)


class _Fitter:
    def __init__(self, out: Translation, megatron: MegatronFlags | None) -> None:
        self._out, self._megatron = out, megatron
        self._table = {flag: spec for flag, (_, spec) in flag_table().items()}

    def run(self, program: str, device: str) -> None:
        """All steps, in order."""
        self._settle()
        for name, value in DEFAULTS.items():
            if not self._has(name):
                self._add(name, value, "slime's and Vime's default; ours is another one.")
        gpus, nodes = self._text("--actor-num-gpus-per-node"), self._text("--actor-num-nodes") or "1"
        if self._has("--colocate") and not self._has("--rollout-num-gpus") and gpus is not None and (gpus + nodes).isdigit():
            why = "with --colocate slime and Vime give engines all of the trainer's GPUs; here the default is one engine's."
            self._add("--rollout-num-gpus", str(int(gpus) * int(nodes)), why)
        if device == "cuda":
            self._add("--device", "cuda", "slime and Vime compute on GPUs; here the CPU is the default.")
        if program == "train_async.py":
            self._add("--max-weight-staleness", "1", "train_async.py: the next step is generated while this one is trained.")
        for _ in range(_GIVEN_UP):
            problems, pending = self._problems()
            dropped = [problem for problem in problems if self._drop_named(problem)]
            if not dropped:
                break
        for problem in problems:
            self._out.notes.append(Note(kind="could not", place="", what="these flags together", why=problem))
        for sentence in pending:
            self._mark(sentence)
        if pending:
            self._mark_what_depends()
        for flag in self._out.flags:
            if flag.name in DIFFERS:
                self._out.notes.append(Note(kind="differs", place=flag.place, what=flag.name, why=CHANGED[flag.name]))

    def _has(self, *names: str) -> bool:
        return any(flag.name in names for flag in self._out.flags)

    def _text(self, name: str) -> str | None:
        flag = next((flag for flag in self._out.flags if flag.name == name), None)
        return flag.values[0].usual if flag is not None and len(flag.values) == 1 else None

    def _is_zero(self, name: str) -> bool:
        return bool(re.fullmatch(r"0*\.?0*(e[+-]?\d+)?", self._text(name) or "x", re.IGNORECASE))

    def _add(self, name: str, value: str, why: str) -> None:
        self._out.flags.insert(0, Flag(name, (literal(value),), ""))
        self._out.notes.append(Note(kind="added", place="", what=f"{name} {value}", why=why))

    def _mark(self, sentence: str) -> None:
        """Mark the flag of a sentence that says what is not available yet."""
        name, _, why = sentence.partition(" ")
        why = re.sub(r"^.*is not available yet: ", "", why)
        for number, flag in enumerate(self._out.flags):
            if flag.name == name:
                self._out.flags[number] = replace(flag, pending=True)
                self._out.notes.append(Note(kind="not yet", place=flag.place, what=flag.shown, why=why))

    def _mark_what_depends(self) -> None:
        """Mark what has no effect once the flags that are not available yet are left out."""
        for _ in range(_GIVEN_UP):
            rest = replace(self._out, flags=[flag for flag in self._out.flags if not flag.pending])
            idle = [match for problem in _Fitter(rest, self._megatron)._problems()[0] if (match := _NO_EFFECT.match(problem))]
            if not idle:
                return
            for match in idle:
                for name in re.findall(r"--[\w-]+", match["flags"]):
                    self._mark(f"{name} is not available yet: it waits for the flags above, and has no effect {match['why']}")

    def _drop(self, names: Iterable[str], why: str) -> bool:
        """Take flags out; whether there were any."""
        dropped = [flag for flag in self._out.flags if flag.name in tuple(names)]
        for flag in dropped:
            self._out.flags.remove(flag)
            told = [note for note in self._out.notes if note.place == flag.place and note.new == flag.shown]
            self._out.notes = [note for note in self._out.notes if note not in told]
            self._out.notes.append(Note(kind="dropped", place=flag.place, what=told[0].what if told else flag.shown, why=why))
        return bool(dropped)

    def _settle(self) -> None:
        """What slime takes without effect, or decides itself, and our rules refuse."""
        if self._is_zero("--kl-loss-coef"):
            coefficient = ("--use-kl-loss", "--kl-loss-coef", "--kl-loss-type", "--use-unbiased-kl")
            self._drop(coefficient, "with a coefficient of 0 it changes nothing, and slime runs the reference model for it.")
        if self._is_zero("--kl-coef"):
            self._drop(["--kl-coef"], "0 changes nothing.")
        rules: tuple[tuple[bool, tuple[str, ...], str], ...] = (
            (self._has("--num-rollout"), ("--num-epoch",), "slime lets --num-rollout win."),
            (self._has("--global-batch-size"), ("--num-steps-per-rollout",), "it follows from --global-batch-size."),
            (self._has("--use-dynamic-batch-size"), ("--micro-batch-size",), "micro-batches are packed by tokens."),
            (not self._has("--use-dynamic-batch-size"), ("--max-tokens-per-gpu",), "slime reads it with --use-dynamic-batch-size only."),
            (not self._has("--eval-interval"), ("--eval-prompt-data",), "without --eval-interval slime does not evaluate."),
            (not self._has("--eval-prompt-data", "--eval-config"), ("--eval-interval",), "there is nothing to evaluate on."),
            (not self._has("--save"), ("--save-interval",), "without --save there is nowhere to save."),
        )
        for when, names, why in rules:
            if when:
                self._drop(names, why)
        if self._has("--debug-train-only"):
            self._drop([name for name in self._others() if name.startswith((*_ENGINES, _ROUTER))], "--debug-train-only starts no engines.")
        if self._has("--debug-rollout-only"):
            trainer = [name for name in self._others() if not name.startswith((*_ENGINES, _ROUTER))]
            self._drop(trainer, "--debug-rollout-only starts no trainer.")

    def _others(self) -> list[str]:
        """The names of Megatron's, vLLM's and the router's flags."""
        return [flag.name for flag in self._out.flags if flag.name not in self._table]

    def _drop_named(self, problem: str) -> bool:
        """Drop the flags of a problem that says of flags that they have no effect."""
        match = _NO_EFFECT.match(problem)
        return match is not None and self._drop(re.findall(r"--[\w-]+", match["flags"]), f"no effect {match['why']}")

    def _problems(self) -> tuple[list[str], list[str]]:
        """(what our own parser and rules object to, what is not available yet); what only the environment gives is not judged."""
        own = [flag for flag in self._out.flags if flag.name in self._table]
        known = [flag for flag in own if flag.texts is not None or self._is_text(flag)]
        unsure = frozenset(flag.name for flag in own if flag not in known) | self._out.unread
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "prompts.jsonl")
            file.write_text("{}\n", encoding="utf-8")
            values = parse_own((flag.name, self._values(flag, folder, str(file))) for flag in known)
            config = self._config(values)
            problems = [problem for problem in values.problems if unsure.isdisjoint(flags_in(problem))]
            try:
                check_rules(config, planned=True, unsure=unsure | values.unsure)
            except ConfigError as error:
                problems += error.problems
        hidden = [
            f"{flag.name} is not available yet: {reason}"
            for flag in own
            if flag not in known and (reason := self._table[flag.name].not_yet)
        ]
        return problems, [*not_available(config), *hidden]

    def _is_text(self, flag: Flag) -> bool:
        """Whether any value would parse."""
        spec = self._table[flag.name]
        return spec.type is str and spec.choices is None

    def _config(self, values: OwnValues) -> RunConfig:
        others = [flag for flag in self._out.flags if flag.name not in self._table]
        megatron = dict[str, Any]()
        if self._megatron is not None:
            for flag in others:
                if self._megatron.knows(flag.name):
                    megatron |= self._megatron.values(flag.name, flag.values)[0]
        names = [flag.name for flag in others]
        return RunConfig(
            **values.sections,
            vllm_tokens=tuple(name for name in names if name.startswith(_ENGINES)),
            router_tokens=tuple(name for name in names if name.startswith(_ROUTER)),
            megatron_tokens=tuple(name for name in names if not name.startswith((*_ENGINES, _ROUTER))),
            given=values.given,
            megatron={name: value for name, value in megatron.items() if value is not None},
        )

    def _values(self, flag: Flag, folder: str, file: str) -> list[str]:
        """A flag's values for the check, with folders and files that exist."""
        values = [value.usual if value.usual is not None else value.shown for value in flag.values]
        if flag.name == "--eval-prompt-data":
            return [file if number % 2 else value for number, value in enumerate(values)]
        stand_in = {"folder": folder, "file": file}.get(self._table[flag.name].path or "")
        return [stand_in] if stand_in is not None and len(values) == 1 else values
