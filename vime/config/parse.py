"""Our own flags: values parsed and checked against the fields' types and bounds; every mistake found is reported at once."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vime.config.fields import FlagSpec, flag_specs
from vime.config.run import SECTIONS

__all__ = ["OwnValues", "flag_table", "is_switch", "own_flags", "parse_own", "taken_back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnValues:
    """The sections, with defaults where a value is wrong or missing, and what is wrong."""

    sections: dict[str, Any]  # section name -> section object
    problems: list[str]
    unsure: frozenset[str]  # flags whose value is not known
    given: frozenset[str]  # names of the fields that were set; a switch that was taken back (--no-x) is not


def flag_table() -> dict[str, tuple[str, FlagSpec]]:
    """flag -> (section name, spec), over all sections."""
    return {spec.flag: (section, spec) for section, cls in SECTIONS.items() for spec in flag_specs(cls)}


def own_flags() -> dict[str, tuple[str, FlagSpec]]:
    """`flag_table`, and --no-x for each switch --x: it takes back what a file says."""
    table = flag_table()
    switches = {flag: entry for flag, entry in table.items() if is_switch(entry[1]) and not flag.startswith("--no-")}
    return {taken_back(flag): entry for flag, entry in switches.items()} | table


def is_switch(spec: FlagSpec) -> bool:
    """Whether the flag takes no value."""
    return spec.type is bool and not spec.many


def taken_back(flag: str) -> str:
    """The flag that sets a switch back to what it is without it."""
    return "--no-" + flag.removeprefix("--")


def parse_own(flags: Iterable[tuple[str, list[str]]]) -> OwnValues:
    """Build the sections from (flag, values) pairs."""
    table = own_flags()
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    problems: list[str] = []
    unsure: set[str] = set()
    given: set[str] = set()
    seen: dict[str, tuple[str, list[str]]] = {}
    for flag, raw in flags:
        section, spec = table[flag]
        if spec.name in seen and seen[spec.name] != (flag, raw):
            first, again = (" ".join([name, *words]) for name, words in (seen[spec.name], (flag, raw)))
            problems.append(f"{spec.flag} is given twice, as '{first}' and '{again}': keep one.")
        seen[spec.name] = flag, raw
        try:
            values[section][spec.name] = _value(spec, flag, raw)
        except ValueError as error:
            problems.append(str(error))
            unsure.add(spec.flag)
        if flag == spec.flag:
            given.add(spec.name)
    for flag, (_, spec) in flag_table().items():
        if spec.required and spec.name not in seen:
            problems.append(f"{flag} is required: {spec.doc}")
            unsure.add(flag)
    sections = {section: cls(**values[section]) for section, cls in SECTIONS.items()}
    return OwnValues(sections=sections, problems=problems, unsure=frozenset(unsure), given=frozenset(given))


def _value(spec: FlagSpec, flag: str, raw: list[str]) -> Any:
    """The typed value of one flag; ValueError says what was expected."""
    if is_switch(spec):
        if raw:
            raise ValueError(f"{flag} takes no value, got '{' '.join(raw)}': give the flag alone, or leave it out.")
        return spec.negated if flag == taken_back(spec.flag) else not spec.negated
    if spec.many:
        if not raw:
            raise ValueError(f"{spec.flag} needs one or more values.")
        return [_scalar(spec, text) for text in raw]
    if len(raw) != 1:
        got = "none" if not raw else f"{len(raw)}: '{' '.join(raw)}'"
        raise ValueError(f"{spec.flag} takes one value, got {got}.")
    return _scalar(spec, raw[0])


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its pairs. ValueError when a name stands in it twice: the last one would win in silence."""
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"'{twice[0]}' stands in it twice: keep one")
    return dict(pairs)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _scalar(spec: FlagSpec, text: str) -> Any:
    if spec.type is dict:
        try:
            value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
        except json.JSONDecodeError as error:
            raise ValueError(f"{spec.flag} takes a JSON object, got '{text}' ({error.msg} at character {error.pos}).") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{spec.flag} takes a JSON object, got '{text[:200]}' ({error}).") from None
        if not isinstance(value, dict):
            raise ValueError(f"{spec.flag} takes a JSON object like '{{\"key\": 1}}', got '{text}'.")
        return value
    if spec.type is str:
        if spec.choices and text not in spec.choices:
            close = difflib.get_close_matches(text, spec.choices, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise ValueError(f"{spec.flag} takes one of {', '.join(spec.choices)}; got '{text}'.{hint}")
        if not text:
            raise ValueError(f"{spec.flag} takes a text, got an empty one: is a variable not set? Leave the flag out, or fill it in.")
        return text
    try:
        value = spec.type(text if re.fullmatch(r"[\w.+-]+", text, re.ASCII) and "_" not in text else "no number")
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
