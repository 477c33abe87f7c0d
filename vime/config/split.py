"""Who owns each token of the command line: ours, Megatron's, vLLM's (--vllm-X, --no-vllm-X) or vllm-router's (--router-X).

A token that starts with "--" opens a flag; the tokens up to the next such one are its values ("-0.1" is a value).
Our own flags are claimed first, so --vllm-router-ip is ours although it carries vLLM's prefix.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from vime.config.names import NameIndex

__all__ = ["COMMAND_LINE", "Given", "OwnedTokens", "by_owner", "owner_of", "read_tokens"]

COMMAND_LINE = "command line"
_PREFIXES = {"--vllm-": "vllm", "--no-vllm-": "vllm", "--router-": "router"}
_DASHES = "‐‑‒–—―−"


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One flag with its values, as it was given."""

    flag: str  # without "=value"
    values: tuple[str, ...]
    raw: tuple[str, ...]  # the tokens as typed: they are handed on as they are
    source: str = COMMAND_LINE  # or "run.yaml:12"


@dataclass(slots=True)
class OwnedTokens:
    """What was given, split by owner. Raw tokens, in the user's order, prefixes of vLLM and the router stripped."""

    own: list[tuple[str, list[str]]] = field(default_factory=list)  # (flag, values)
    megatron: list[str] = field(default_factory=list)
    vllm: list[str] = field(default_factory=list)
    router: list[str] = field(default_factory=list)


def owner_of(flag: str, own_flags: Collection[str]) -> str:
    """Whose a flag is: "own", "megatron", "vllm" or "router"."""
    if flag in own_flags:
        return "own"
    return next((owner for prefix, owner in _PREFIXES.items() if flag.startswith(prefix) and flag != prefix), "megatron")


def by_owner(given: Iterable[Given], own_flags: Collection[str]) -> OwnedTokens:
    """Split what was given by owner."""
    out = OwnedTokens()
    for one in given:
        owner = owner_of(one.flag, own_flags)
        if owner == "own":
            out.own.append((one.flag, list(one.values)))
        else:
            bare = re.sub(r"^--(no-)?(vllm|router)-", r"--\1", one.raw[0]) if owner != "megatron" else one.raw[0]
            getattr(out, owner).extend([bare, *one.raw[1:]])
    return out


def read_tokens(argv: Sequence[str], own_flags: NameIndex) -> tuple[list[Given], list[str]]:
    """(the flags of a command line, problems with tokens that are none and belong to none)."""
    given: list[Given] = []
    problems: list[str] = []
    raw: list[str] = []
    stray: list[str] = []
    for token in [*argv, None]:
        if token is not None and not token.startswith("--"):
            if problem := _dash_problem(token, own_flags):
                problems.append(problem)
            else:
                (raw if raw else stray).append(token)
            continue
        if token == "--":
            problems.append("'--' alone is no flag: leave it out.")
            continue
        if raw:
            flag, equals, value = raw[0].partition("=")
            given.append(Given(flag=flag, values=(*([value] if equals else []), *raw[1:]), raw=tuple(raw)))
            problems += _disguised(given[-1], own_flags)
        raw = [token] if token is not None else []
    if stray:
        near = own_flags.one_edit(stray[0])
        cure = f"write {', or '.join(near)}" if near else "values follow their flag, as in --rollout-batch-size 64"
        problems.append(f"'{' '.join(stray)}' belongs to no flag: {cure}.")
    return given, problems


def _dash_problem(token: str, own_flags: NameIndex) -> str | None:
    """A flag's name behind another dash than "--"."""
    if match := re.match(rf"([{_DASHES}]-?|-[{_DASHES}])(?=[A-Za-z])", token):
        return f"'{token}' begins with a dash that is none of the keyboard's (copied from a document?): write --{token[match.end() :]}."
    if re.match(r"-[A-Za-z]", token):
        meant = ", or ".join(own_flags.one_edit(token) or [f"-{token}"])
        return f"'{token}' has one dash; flags have two: {meant}. If it is a value, join it to its flag: --flag={token}"
    return None


def _disguised(one: Given, own_flags: NameIndex) -> list[str]:
    """Further values of a flag that are one edit away from a flag of ours."""
    return [
        f"'{value}' looks like {', or '.join(near)}, and stands as a value of {one.flag}. "
        f"If it is one, join it to its flag: {one.flag}={value}"
        for value in one.values[1:]
        if (near := own_flags.one_edit(value))
    ]
