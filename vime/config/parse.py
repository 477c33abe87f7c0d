"""Our own flags: values parsed and checked against the fields' types and bounds; every mistake found is reported at once."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from typing import Any

from vime.config.fields import FlagSpec, flag_specs
from vime.config.run import SECTIONS
from vime.errors import ConfigError

__all__ = ["flag_table", "help_text", "nearest", "parse_own"]


def flag_table() -> dict[str, tuple[str, FlagSpec]]:
    """flag -> (section name, spec), over all sections."""
    return {spec.flag: (section, spec) for section, cls in SECTIONS.items() for spec in flag_specs(cls)}


def parse_own(flags: Iterable[tuple[str, list[str]]]) -> dict[str, Any]:
    """Build the sections from (flag, values) pairs: {section name: section object}. Raises ConfigError with all problems."""
    table = flag_table()
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    problems: list[str] = []
    seen: dict[str, list[str]] = {}
    for flag, raw in flags:
        section, spec = table[flag]
        if flag in seen and seen[flag] != raw:
            problems.append(f"{flag} is given twice, as '{' '.join(seen[flag])}' and '{' '.join(raw)}': keep one.")
        seen[flag] = raw
        try:
            values[section][spec.name] = _value(spec, raw)
        except ValueError as error:
            problems.append(str(error))
    problems += [
        f"{flag} is required: {spec.doc}"
        for flag, (section, spec) in table.items()
        if spec.required and spec.name not in values[section] and flag not in seen
    ]
    if problems:
        raise ConfigError(*problems)
    return {section: cls(**values[section]) for section, cls in SECTIONS.items()}


def _value(spec: FlagSpec, raw: list[str]) -> Any:
    """The typed value of one flag; ValueError says what was expected."""
    if spec.type is bool and not spec.many:
        if raw:
            raise ValueError(f"{spec.flag} takes no value, got '{' '.join(raw)}': give the flag alone, or leave it out.")
        return not spec.negated
    if spec.many:
        if not raw:
            raise ValueError(f"{spec.flag} needs one or more values.")
        return [_scalar(spec, text) for text in raw]
    if len(raw) != 1:
        got = "none" if not raw else f"{len(raw)}: '{' '.join(raw)}'"
        raise ValueError(f"{spec.flag} takes one value, got {got}.")
    return _scalar(spec, raw[0])


def _scalar(spec: FlagSpec, text: str) -> Any:
    if spec.type is dict:
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{spec.flag} takes a JSON object, got '{text}' ({error.msg} at character {error.pos}).") from None
        if not isinstance(value, dict):
            raise ValueError(f"{spec.flag} takes a JSON object like '{{\"key\": 1}}', got '{text}'.")
        return value
    if spec.type is str:
        if spec.choices and text not in spec.choices:
            close = difflib.get_close_matches(text, spec.choices, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise ValueError(f"{spec.flag} takes one of {', '.join(spec.choices)}; got '{text}'.{hint}")
        return text
    try:
        value = spec.type(text)
    except ValueError:
        kind = {int: "a whole number", float: "a number"}[spec.type]
        raise ValueError(f"{spec.flag} takes {kind}, got '{text}'.") from None
    if spec.type is float and not math.isfinite(value):
        raise ValueError(f"{spec.flag} takes a finite number, got '{text}'.")
    for bad, sign, bound in (
        (spec.ge is not None and not value >= spec.ge, ">=", spec.ge),
        (spec.gt is not None and not value > spec.gt, ">", spec.gt),
        (spec.le is not None and not value <= spec.le, "<=", spec.le),
    ):
        if bad:
            raise ValueError(f"{spec.flag} must be {sign} {bound:g}, got {text}.")
    return value


def nearest(flag: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The names most like `flag`, best first."""
    return difflib.get_close_matches(flag, list(candidates), n=count, cutoff=0.6)


def help_text() -> str:
    """All our own flags, grouped by section, with defaults."""
    lines = [
        "usage: vime train --hf-checkpoint DIR --prompt-data FILE --rollout-batch-size N --num-rollout N [flags]",
        "",
        "Megatron's own flags are given under their own names, vLLM's as --vllm-X, vllm-router's as --router-X.",
    ]
    for section, cls in SECTIONS.items():
        lines += ["", f"{section}: {(cls.__doc__ or '').splitlines()[0]}"]
        for spec in flag_specs(cls):
            lines += _help_lines(spec)
    return "\n".join(lines)


def _help_lines(spec: FlagSpec) -> list[str]:
    kind = "" if spec.type is bool else " " + (f"{{{','.join(spec.choices)}}}" if spec.choices else spec.type.__name__.upper())
    default = "" if spec.type is bool or spec.default in (None, [], {}) else f" [{spec.default}]"
    return [f"  {spec.flag}{kind}{' ...' if spec.many else ''}", f"      {spec.doc}{default}{' (required)' if spec.required else ''}"]
