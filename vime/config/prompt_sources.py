"""How `--prompt-data` names its sources: files or folders, slices of them, several with weights. Text only; nothing is opened.

prompts.jsonl                        one file
prompts.parquet@[0:1000]             its first thousand rows
3*math.jsonl,1*code.jsonl@[100:]     three rows of one for each of the other
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from vime.errors import ConfigError

__all__ = ["Source", "joined", "split_slice", "split_sources"]

_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
_WEIGHT = re.compile(r"^(?P<weight>\d+(?:\.\d+)?)\*(?P<spec>.+)$", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One source of prompts: path@[a:b], and its share where there are several."""

    spec: str
    weight: float | None = None

    @property
    def path(self) -> str:
        """The file or folder, without the slice."""
        return split_slice(self.spec)[0]


def split_slice(spec: str) -> tuple[str, slice]:
    """'path@[a:b]' -> (path, slice(a, b)); either bound may be missing or negative, as in Python."""
    match = _SLICE.match(spec)
    if match is None:
        if "@[" in spec:
            raise ConfigError(f"'{spec}': the slice is not of the form path@[start:stop], e.g. prompts.jsonl@[0:100].")
        return spec, slice(None)
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    return match["path"], slice(start, stop)


def split_sources(text: str) -> list[Source]:
    """The sources that a value of --prompt-data names; a path that exists as it stands is one source, commas and all.

    Raises:
        ConfigError: a slice is malformed, a weight is 0, or only some of the sources have weights.
    """
    if os.path.exists(text if "," in text else split_slice(text)[0]):
        return [Source(spec=text)]
    sources = []
    for part in text.split(","):
        match = _WEIGHT.match(part.strip())
        source = Source(spec=match["spec"], weight=float(match["weight"])) if match else Source(spec=part.strip())
        split_slice(source.spec)
        if not source.spec or source.weight == 0:
            raise ConfigError(f"--prompt-data '{text}': '{part}' names no source. Give weight*path@[a:b],weight*path, weights above 0.")
        sources.append(source)
    weighted = [source for source in sources if source.weight is not None]
    if weighted and len(weighted) < len(sources):
        bare = next(source.spec for source in sources if source.weight is None)
        raise ConfigError(f"--prompt-data '{text}': '{bare}' has no weight and others have. Give one to each, as in 2*a.jsonl,1*b.jsonl.")
    return sources


def joined(sources: list[Source]) -> str:
    """The inverse of `split_sources`."""
    return ",".join(source.spec if source.weight is None else f"{source.weight:g}*{source.spec}" for source in sources)
