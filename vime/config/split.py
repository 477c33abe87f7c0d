"""Who owns each token of the command line: ours, Megatron's, vLLM's (--vllm-X, --no-vllm-X) or vllm-router's (--router-X).

A token that starts with "--" opens a flag; the tokens up to the next such one are its values ("-0.1" is a value).
Our own flags are claimed first, so --vllm-router-ip is ours although it carries vLLM's prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from vime.errors import ConfigError

__all__ = ["OwnedTokens", "split_tokens"]


@dataclass(slots=True)
class OwnedTokens:
    """The command line, split by owner. Raw tokens, in the user's order, prefixes of vLLM and the router stripped."""

    own: list[tuple[str, list[str]]] = field(default_factory=list)  # (flag, values)
    megatron: list[str] = field(default_factory=list)
    vllm: list[str] = field(default_factory=list)
    router: list[str] = field(default_factory=list)


def split_tokens(argv: Sequence[str], own_flags: Collection[str]) -> OwnedTokens:
    """Split `argv`. Raises ConfigError for values that belong to no flag."""
    out = OwnedTokens()
    for flag, values, raw in _flags(argv):
        if flag in own_flags:
            out.own.append((flag, values))
        elif flag.startswith("--vllm-"):
            out.vllm += ["--" + raw[0].removeprefix("--vllm-"), *raw[1:]]
        elif flag.startswith("--no-vllm-"):
            out.vllm += ["--no-" + raw[0].removeprefix("--no-vllm-"), *raw[1:]]
        elif flag.startswith("--router-"):
            out.router += ["--" + raw[0].removeprefix("--router-"), *raw[1:]]
        else:
            out.megatron += raw
    return out


def _flags(argv: Sequence[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """(flag, values, raw tokens) for each flag; "--x=1" and "--x 1" give the same flag and values."""
    raw: list[str] = []
    stray: list[str] = []
    for token in [*argv, "--"]:
        if not token.startswith("--"):
            (raw if raw else stray).append(token)
            continue
        if raw:
            flag, equals, value = raw[0].partition("=")
            yield flag, ([value] if equals else []) + raw[1:], raw
        raw = [token]
    if stray:
        raise ConfigError(f"'{' '.join(stray)}' belongs to no flag: values follow their flag, as in --rollout-batch-size 64.")
