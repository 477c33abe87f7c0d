"""What was sent against what was received, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Sent", "describe", "differences"]

Sent = tuple[str, list[int], str]  # dtype, shape, digest

_SHOWN = 10  # names listed per kind of difference


def differences(sent: Mapping[str, Sent], received: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
    """Names (with details) by kind: missing, extra, of another shape or dtype, with other content. Empty when all agree."""
    found: dict[str, list[str]] = {"missing": [], "extra": [], "of another shape or dtype": [], "with other content": []}
    for name, (dtype, shape, digest) in sent.items():
        if name not in received:
            found["missing"].append(name)
            continue
        got_dtype, got_shape, got_digest = received[name]
        if (got_dtype, list(got_shape)) != (dtype, list(shape)):
            found["of another shape or dtype"].append(f"{name} ({got_dtype} {list(got_shape)} instead of {dtype} {list(shape)})")
        elif got_digest != digest:
            found["with other content"].append(name)
    found["extra"] = [name for name in received if name not in sent]
    return {kind: names for kind, names in found.items() if names}


def describe(found: Mapping[str, list[str]]) -> list[str]:
    """One phrase per kind. Example: "2 tensors with other content: a.weight, b.weight"."""
    phrases = []
    for kind, names in found.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        phrases.append(f"{len(names)} tensor{'s' if len(names) > 1 else ''} {kind}: {', '.join(names[:_SHOWN])}{more}")
    return phrases
