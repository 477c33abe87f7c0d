"""What the report says of one thing in the script."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KINDS", "Note"]

KINDS = {  # kind -> the report's heading, in its order
    "changed": "Changed",
    "added": "Added",
    "differs": "Same name, other meaning",
    "not yet": "Not available yet",
    "could not": "Could not",
    "dropped": "Dropped",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One line of the report."""

    kind: str  # a key of KINDS
    place: str  # "line 12", or "" when it has none
    what: str  # as it stands in the script
    why: str
    new: str | None = None  # what stands in its place
