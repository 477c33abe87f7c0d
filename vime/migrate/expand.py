"""What the words of a script stand for, as far as its own assignments say it."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from vime.errors import ConfigError
from vime.migrate.lexer import Array, Expansion, Op, Substitution, Text, Word, tokens_of
from vime.migrate.values import Opaque, Piece, Reference, Value, literal

__all__ = ["ARGUMENTS", "Item", "Variables"]

MOST_TEXT = 1_000_000  # characters of a variable: one that grows by itself is not followed further
MOST_WORDS = 10_000  # of an array

ARGUMENTS = Reference("@", None, "the script's own arguments")  # "$@"

_BODY = re.compile(r"(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?P<index>\[[^\]]*\])?(?P<op>:?[-=?+])?(?P<rest>.*)", re.DOTALL)
_CD = re.compile(r"\$\(\s*cd\s+(?:--\s+)?(?P<path>.+?)\s*(?:&?>\s*/dev/null\s*(?:2>&1)?)?\s*&&\s*pwd(?:\s+-P)?\s*\)", re.DOTALL)
_PATH_TOOL = re.compile(r"\$\(\s*(?P<tool>dirname|basename|realpath|readlink\s+-f)\s+(?:--\s+)?(?P<path>.+?)\s*\)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Item:
    """One word of an array or of a command, after expansion."""

    value: Value
    place: str  # "line 12"
    group: str | None = None  # the array that it stood in


@dataclass(slots=True)
class Variables:
    """The variables of a script while it is read. `file` is the file being read, `place` the command."""

    file: str
    place: str = ""
    scalars: dict[str, Value] = field(default_factory=dict)
    arrays: dict[str, list[Item]] = field(default_factory=dict)
    unset_arrays: dict[str, str] = field(default_factory=dict)  # expanded, though nowhere assigned: name -> place
    kept_whole: list[Item] = field(default_factory=list)  # bash would have split them

    def words(self, word: Word | Array) -> list[Item]:
        """One word as the shell would hand it on: none, one or several."""
        if isinstance(word, Array):
            raise ConfigError(f"{self.place}: an array '{word.name}=(' stands where a word was expected.")
        if len(word.parts) == 1 and isinstance(part := word.parts[0], Expansion) and (match := _BODY.fullmatch(part.body)):
            if match["index"] in ("[@]", "[*]") and match["op"] is None and not match["rest"]:
                return self._elements(match["name"], part.quoted)
            if match["name"] in "@*" and match["op"] is None and not match["rest"]:
                return [Item(Value((ARGUMENTS,)), self.place)]
        out: list[list[Piece]] = [[]]
        for part in word.parts:
            for number, stretch in enumerate(self._stretches(part)):
                if number:
                    out.append([])
                out[-1] += stretch
        whole = any(isinstance(part, Text) and part.quoted for part in word.parts)
        return [Item(Value.of(pieces), self.place) for pieces in out if pieces or whole]

    def value(self, word: Word) -> Value:
        """One word as the right side of an assignment: never split."""
        return Value.of(piece for part in word.parts for piece in self._pieces(part))

    def assign(self, name: str, value: Value, *, append: bool = False) -> None:
        """NAME=value or NAME+=value."""
        before = self._named(name).pieces if append else ()
        self.arrays.pop(name, None)
        if sum(map(_size, before)) + sum(map(_size, value.pieces)) > MOST_TEXT:
            self.forget(name, f"longer than {MOST_TEXT} characters ({self.place})")
            return
        self.scalars[name] = Value.of([*before, *value.pieces])

    def assign_array(self, array: Array, line_of: str) -> None:
        """NAME=(words) or NAME+=(words); `line_of` is the place's pattern, with {} for the line."""
        items = [
            replace(item, place=line_of.format(word.line), group=array.name) if item.group is None else item
            for word in array.words
            for item in self.words(word)
        ]
        whole = (self.arrays.get(array.name, []) if array.append else []) + items
        if len(whole) > MOST_WORDS:
            self.arrays.pop(array.name, None)
            self.forget(array.name, f"of more than {MOST_WORDS} words ({self.place})")
            return
        self.arrays[array.name] = whole
        self.scalars.pop(array.name, None)

    def forget(self, name: str, why: str) -> None:
        """The script sets `name` in a way that is not followed."""
        self.scalars[name] = Value((Reference(name, None, why),))

    def _elements(self, name: str, quoted: bool) -> list[Item]:
        if name in self.arrays:
            items = self.arrays[name]
            if not quoted:
                self.kept_whole += [item for item in items if item.value.exact and re.search(r"\s", item.value.exact)]
            return [replace(item, group=item.group or name) for item in items]
        if name in self.scalars:
            return [Item(self.scalars[name], self.place)]
        self.unset_arrays[name] = self.place
        return []

    def _stretches(self, part: Text | Expansion | Substitution) -> Iterator[list[Piece]]:
        """The pieces of a part, cut where the shell would split an unquoted variable's text into words."""
        pieces = self._pieces(part)
        if isinstance(part, Text) or part.quoted:
            yield list(pieces)
            return
        stretch: list[Piece] = []
        for piece in pieces:
            texts = re.split(r"\s+", piece) if isinstance(piece, str) else [piece]
            for number, text in enumerate(texts):
                if number:
                    yield stretch
                    stretch = []
                stretch += [text] if text != "" else []
        yield stretch

    def _pieces(self, part: Text | Expansion | Substitution) -> tuple[Piece, ...]:
        if isinstance(part, Text):
            return (part.text,)
        if isinstance(part, Substitution):
            return self._substitution(part.raw)
        return self._expansion(part.body)

    def _expansion(self, body: str) -> tuple[Piece, ...]:
        match = _BODY.fullmatch(body)
        if match is None or (match["rest"] and match["op"] is None):
            return (Opaque("${" + body + "}"),)
        name, index, op = match["name"], match["index"], (match["op"] or "").removeprefix(":")
        if name == "BASH_SOURCE" or (name == "0" and index is None):
            return (self.file,)
        if index not in (None, "[0]") or (not name.isidentifier() and not name.isdigit()):
            return (Opaque("${" + body + "}"),)
        known = self._named(name)
        if op == "+":
            return (Opaque("${" + body + "}"),)
        empty = not known.pieces and match["op"] is not None and match["op"].startswith(":")
        if op in ("", "?") or (known.pieces != (Reference(name),) and not empty):  # without a default, or set
            return known.pieces
        default = self._text(match["rest"])
        found = default if empty else Value((Reference(name, default),))
        if op == "=":
            self.scalars[name] = found
        return found.pieces

    def _named(self, name: str) -> Value:
        if name in self.scalars:
            return self.scalars[name]
        if self.arrays.get(name):
            return self.arrays[name][0].value
        return Value((Reference(name),))

    def _text(self, source: str) -> Value:
        """The value of a piece of script that stands for one word, such as a default."""
        tokens = tokens_of(source, self.place)
        if any(isinstance(token, Op | Array) for token in tokens):
            return Value((Opaque(source),))
        pieces: list[Piece] = []
        for number, token in enumerate(tokens):
            assert isinstance(token, Word)
            pieces += ([" "] if number else []) + list(self.value(token).pieces)
        return Value.of(pieces)

    def _arithmetic(self, raw: str) -> str | None:
        """The number that $((...)) is, when all its variables are whole numbers that the script states."""
        match = re.fullmatch(r"\$\(\((.*)\)\)", raw, re.DOTALL)
        if match is None:
            return None
        source = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: self._named(name[1]).exact or "?", match[1])
        if not re.fullmatch(r"[\d\s()+*/%-]+", source):
            return None
        try:
            return str(_whole(ast.parse(source.strip(), mode="eval").body))
        except (SyntaxError, ZeroDivisionError):
            return None

    def _substitution(self, raw: str) -> tuple[Piece, ...]:
        """A command's output: sums, rows of numbers and the ways of naming the script's folder are understood."""
        if (number := self._arithmetic(raw)) is not None:
            return (number,)
        if match := re.fullmatch(r"\$\(\s*seq((?:\s+-?\d+){1,3})\s*\)", raw):
            *first, last = map(int, match[1].split())
            begin, step = (*first, 1)[:2] if first else (1, 1)
            return ("\n".join(map(str, range(begin, last + (1 if step > 0 else -1), step))) if step else Opaque(raw),)
        if re.fullmatch(r"\$\(\s*pwd\s*\)|`\s*pwd\s*`", raw):
            return (Reference("PWD"),)
        match = _CD.fullmatch(raw) or _PATH_TOOL.fullmatch(raw)
        path = self._text(match["path"]).exact if match is not None else None
        if match is None or path is None:
            return (Opaque(raw),)
        tool = match.groupdict().get("tool")
        if tool in ("dirname", "basename"):
            return literal((os.path.dirname(path) or ".") if tool == "dirname" else os.path.basename(path)).pieces
        return literal(os.path.normpath(path)).pieces


def _whole(node: ast.expr) -> int:
    """A sum of whole numbers as bash computes it: divisions are cut off towards zero."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return -_whole(node.operand) if isinstance(node.op, ast.USub) else _whole(node.operand)
    if not isinstance(node, ast.BinOp):
        raise SyntaxError("not a sum")
    left, right = _whole(node.left), _whole(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    if not isinstance(node.op, ast.Div | ast.Mod):
        raise SyntaxError("not a sum")
    quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
    return quotient if isinstance(node.op, ast.Div) else left - quotient * right


def _size(piece: Piece) -> int:
    return len(piece) if isinstance(piece, str) else 1
