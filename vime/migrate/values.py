"""A value of the script: literal text, with the places that only the shell or the environment could fill."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Opaque", "Piece", "Reference", "Value", "literal"]


@dataclass(frozen=True, slots=True)
class Reference:
    """A variable whose value the script does not state: `${name}` or `${name:-default}`.

    `why` says where the value comes from, for a variable that the script itself computes.
    """

    name: str
    default: Value | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Opaque:
    """What is neither text nor a variable: a command's output, an expansion that is not read. As written."""

    raw: str


Piece = str | Reference | Opaque


@dataclass(frozen=True, slots=True)
class Value:
    """A word after expansion. Neighbouring texts are one piece."""

    pieces: tuple[Piece, ...]

    @staticmethod
    def of(pieces: Iterable[Piece]) -> Value:
        """Pieces joined."""
        out: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, str) and out and isinstance(out[-1], str):
                out[-1] += piece
            elif piece != "":
                out.append(piece)
        return Value(tuple(out))

    @property
    def exact(self) -> str | None:
        """The text, when the script states all of it."""
        if not self.pieces:
            return ""
        return self.pieces[0] if len(self.pieces) == 1 and isinstance(self.pieces[0], str) else None

    @property
    def usual(self) -> str | None:
        """The text with defaults filled in; None when something has none."""
        out = ""
        for piece in self.pieces:
            if isinstance(piece, str):
                out += piece
                continue
            default = piece.default.usual if isinstance(piece, Reference) and piece.default is not None else None
            if default is None:
                return None
            out += default
        return out

    @property
    def references(self) -> tuple[Reference, ...]:
        """The variables in it, those of defaults included."""
        found: list[Reference] = []
        for piece in self.pieces:
            if isinstance(piece, Reference):
                found += [piece, *(piece.default.references if piece.default is not None else ())]
        return tuple(found)

    @property
    def opaque(self) -> tuple[str, ...]:
        """What in it cannot be read."""
        found: list[str] = []
        for piece in self.pieces:
            if isinstance(piece, Opaque):
                found.append(piece.raw)
            elif isinstance(piece, Reference) and piece.default is not None:
                found += piece.default.opaque
        return tuple(found)

    @property
    def shown(self) -> str:
        """For messages: as a person would write it."""
        return "".join(
            piece if isinstance(piece, str) else piece.raw if isinstance(piece, Opaque) else _braces(piece) for piece in self.pieces
        )

    @property
    def shell(self) -> str:
        """As one word of bash."""
        if self.exact is not None:
            return shlex.quote(self.exact)
        return '"' + "".join(_escaped(piece) if isinstance(piece, str) else _source(piece) for piece in self.pieces) + '"'


def literal(text: str) -> Value:
    """A value that is text alone."""
    return Value.of([text])


def _escaped(text: str) -> str:
    return re.sub(r'([\\$`"])', r"\\\1", text)


def _braces(reference: Reference) -> str:
    return "${" + reference.name + (f":-{reference.default.shown}" if reference.default is not None else "") + "}"


def _source(piece: Reference | Opaque) -> str:
    if isinstance(piece, Opaque):
        return piece.raw
    if piece.default is None:
        return "${" + piece.name + "}"
    inner = "".join(_escaped(part) if isinstance(part, str) else _source(part) for part in piece.default.pieces)
    return "${" + piece.name + ":-" + inner + "}"
