"""Where each flag comes from, for messages and for `--print-config`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from vime.config.options import UNKNOWN
from vime.config.split import COMMAND_LINE, Given

__all__ = ["flags_in", "sources_of", "with_sources"]


def sources_of(given: Iterable[Given]) -> dict[str, str]:
    """Flag, as problems spell it -> where it was given."""
    out: dict[str, str] = {}
    for one in given:
        name = re.sub(r"^--no-", "--", one.flag)
        out |= dict.fromkeys((one.flag, one.flag.replace("_", "-"), name), one.source)
    return out


def flags_in(text: str) -> list[str]:
    """The flags that a text names, in its order."""
    return list(dict.fromkeys(re.findall(r"(?<![\w-])--[A-Za-z][\w-]*", text)))


def with_sources(problem: str, sources: Mapping[str, str]) -> str:
    """The problem, and where the flags that it names were given; unchanged when that is the command line alone."""
    named = [flag for flag in flags_in(problem) if flag in sources]
    if problem.startswith(UNKNOWN):
        named = named[:1]  # the others are what is advised
    if all(sources[flag] == COMMAND_LINE for flag in named):
        return problem
    if len(named) == 1:
        return f"{problem} ({sources[named[0]]})"
    return f"{problem} ({'; '.join(f'{flag}: {sources[flag]}' for flag in named)})"
