"""A bash script as words and operators, without running any of it.

Words keep their parts apart (literal text, `${...}`, `$(...)`) and know whether each stood in quotes. `NAME=( ... )` becomes one
`Array`. Comments, continued lines and the bodies of here-documents are dropped. What a word means is `script.py`'s business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vime.errors import ConfigError

__all__ = ["Array", "Expansion", "Op", "Part", "Substitution", "Text", "Token", "Word", "tokens_of"]

_OPERATORS = (";;&", "&>>", "<<<", "<<-", "&&", "||", ";;", ";&", "|&", "&>", ">>", ">&", ">|", "<&", "<>", "<<", "\n", *";&|<>()")
_ASSIGNS_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$-]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "e": "\x1b"}


@dataclass(frozen=True, slots=True)
class Text:
    """Literal characters, quotes removed."""

    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Expansion:
    """`$NAME` or `${body}`; `body` is what stands inside the braces."""

    body: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Substitution:
    """`$(...)`, backticks, `$((...))` or `<(...)`, as written."""

    raw: str
    quoted: bool


Part = Text | Expansion | Substitution


@dataclass(frozen=True, slots=True)
class Word:
    """One word; `line` counts from 1."""

    parts: tuple[Part, ...]
    line: int

    @property
    def literal(self) -> str | None:
        """The word's text when nothing in it is expanded."""
        return "".join(part.text for part in self.parts if isinstance(part, Text)) if self.is_literal else None

    @property
    def is_literal(self) -> bool:
        """Whether it is text alone."""
        return all(isinstance(part, Text) for part in self.parts)

    @property
    def bare(self) -> str | None:
        """The word's text when it is literal and no part of it is quoted, as a keyword must be."""
        return self.literal if all(not part.quoted for part in self.parts) else None


@dataclass(frozen=True, slots=True)
class Array:
    """`name=(words)` or `name+=(words)`."""

    name: str
    append: bool
    words: tuple[Word, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Op:
    """An operator; a line's end is one, too."""

    text: str
    line: int


Token = Word | Array | Op


def tokens_of(source: str, name: str) -> list[Token]:
    """The tokens of a script; `name` appears in messages. Raises ConfigError for a quote or bracket that is never closed."""
    return _Lexer(source, name).run()


class _Lexer:
    def __init__(self, source: str, name: str) -> None:
        self._source, self._name = source, name
        self._at, self._line = 0, 1
        self._heredocs: list[tuple[str, bool]] = []  # (delimiter, tabs are stripped), bodies begin after this line

    def run(self) -> list[Token]:
        """All tokens."""
        out: list[Token] = []
        while (token := self._next()) is not None:
            out.append(token)
        return out

    def _next(self) -> Token | None:
        self._skip_blanks()
        if self._at >= len(self._source):
            return None
        if match := re.compile(r"\d+(?=[<>])").match(self._source, self._at):
            self._at = match.end()  # the number before a redirection
        line = self._line
        if self._source.startswith("((", self._at):  # arithmetic: a command of its own, or the head of a for loop
            end = self._balanced(self._at + 1, "(", ")")
            return Word((Substitution(self._take(end + 1), False),), line)
        if self._source[self._at] in "<>" and self._source.startswith("(", self._at + 1):
            return self._word()
        for operator in _OPERATORS:
            if self._source.startswith(operator, self._at):
                self._take(self._at + len(operator))
                if operator in ("<<", "<<-"):
                    self._heredocs.append((self._delimiter(), operator == "<<-"))
                elif operator == "\n":
                    self._skip_heredocs()
                return Op(operator, line)
        return self._word()

    def _take(self, end: int) -> str:
        """The text up to `end`, which is passed over."""
        text = self._source[self._at : end]
        self._at, self._line = end, self._line + text.count("\n")
        return text

    def _skip_blanks(self) -> None:
        while self._at < len(self._source):
            if self._source.startswith("\\\n", self._at):
                self._take(self._at + 2)
            elif self._source[self._at] in " \t\r":
                self._at += 1
            elif self._source[self._at] == "#":
                end = self._source.find("\n", self._at)
                self._at = end if end >= 0 else len(self._source)
            else:
                return

    def _delimiter(self) -> str:
        self._skip_blanks()
        word = self._word()
        assert isinstance(word, Word)
        return "".join(part.text if isinstance(part, Text) else "" for part in word.parts)

    def _skip_heredocs(self) -> None:
        for delimiter, strip in self._heredocs:
            while self._at < len(self._source):
                end = self._source.find("\n", self._at)
                text = self._take(end + 1 if end >= 0 else len(self._source)).rstrip("\n")
                if (text.lstrip("\t") if strip else text) == delimiter:
                    break
        self._heredocs.clear()

    def _word(self) -> Word | Array:
        line, parts = self._line, list[Part]()
        while self._at < len(self._source):
            char = self._source[self._at]
            if char == "(" and (array := self._array(parts, line)) is not None:
                return array
            opens_process = not parts and char in "<>" and self._source.startswith("(", self._at + 1)
            if opens_process:
                parts.append(Substitution(self._take(self._balanced(self._at + 1, "(", ")")), False))
            elif char in " \t\r\n;&|<>()":
                break
            elif self._source.startswith("\\\n", self._at):
                self._take(self._at + 2)
            else:
                parts += self._part(quoted=False)
        return Word(_merged(parts), line)

    def _array(self, parts: list[Part], line: int) -> Array | None:
        """The array that begins here, when what stands before is NAME= or NAME+=."""
        head = "".join(part.text for part in parts if isinstance(part, Text) and not part.quoted)
        if not _ASSIGNS_ARRAY.fullmatch(head) or len(_merged(parts)) != 1:
            return None
        self._take(self._at + 1)
        words: list[Word] = []
        while True:
            self._skip_blanks()
            if self._at >= len(self._source):
                raise ConfigError(f"{self._name} line {line}: the array '{head}(' is never closed.")
            if self._source[self._at] == ")":
                self._take(self._at + 1)
                return Array(head.rstrip("+="), "+" in head, tuple(words), line)
            if self._source[self._at] == "\n":
                self._take(self._at + 1)
                continue
            word = self._word()
            if not isinstance(word, Word) or not word.parts:
                found = self._source[self._at : self._at + 1] or "the end"
                raise ConfigError(f"{self._name} line {self._line}: '{found}' inside the array '{head}(' of line {line}.")
            words.append(word)

    def _part(self, *, quoted: bool) -> list[Part]:
        """The part that begins here: one character, a quoted stretch, or something that the shell would expand."""
        char = self._source[self._at]
        if char == "$":
            return [self._dollar(quoted)]
        if char == "`":
            end = self._source.find("`", self._at + 1)
            if end < 0:
                raise ConfigError(f"{self._name} line {self._line}: a backtick that is not closed.")
            return [Substitution(self._take(end + 1), quoted)]
        if char == "\\":
            escaped = self._take(self._at + 2)
            keeps = quoted and escaped[1:] not in tuple('$`"\\')
            return [Text(escaped if keeps else escaped[1:], True)]
        if not quoted and char == "'":
            end = self._source.find("'", self._at + 1)
            if end < 0:
                raise ConfigError(f"{self._name} line {self._line}: a single quote that is not closed.")
            return [Text(self._take(end + 1)[1:-1], True)]
        if not quoted and char == '"':
            return self._double_quoted()
        return [Text(self._take(self._at + 1), quoted)]

    def _double_quoted(self) -> list[Part]:
        line, parts = self._line, list[Part]([Text("", True)])
        self._take(self._at + 1)
        while not self._source.startswith('"', self._at):
            if self._at >= len(self._source):
                raise ConfigError(f"{self._name} line {line}: a double quote that is not closed.")
            if self._source.startswith("\\\n", self._at):
                self._take(self._at + 2)
            else:
                parts += self._part(quoted=True)
        self._take(self._at + 1)
        return parts

    def _dollar(self, quoted: bool) -> Part:
        at = self._at
        if self._source.startswith("${", at):
            return Expansion(self._take(self._balanced(at + 1, "{", "}"))[2:-1], quoted)
        if self._source.startswith("$(", at):
            return Substitution(self._take(self._balanced(at + 1, "(", ")")), quoted)
        if not quoted and self._source.startswith("$'", at):
            match = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self._source, at)
            if match is None:
                raise ConfigError(f"{self._name} line {self._line}: a $' quote that is not closed.")
            self._take(match.end())
            return Text(re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[0]), match[1]), True)
        match = _NAME.match(self._source, at + 1)
        if match is None:
            return Text(self._take(at + 1), quoted)
        self._take(match.end())
        return Expansion(match.group(), quoted)

    def _balanced(self, at: int, opening: str, closing: str) -> int:
        """The position after the bracket that closes the one at `at`; quotes inside are respected."""
        depth, here = 0, at
        while here < len(self._source):
            char = self._source[here]
            if char == "\\":
                here += 2
                continue
            if char in "'\"":
                here = self._past_quote(here)
                continue
            depth += (char == opening) - (char == closing)
            here += 1
            if depth == 0:
                return here
        raise ConfigError(f"{self._name} line {self._line}: a '{opening}' that is not closed.")

    def _past_quote(self, at: int) -> int:
        quote, here = self._source[at], at + 1
        while here < len(self._source) and self._source[here] != quote:
            if quote == '"' and self._source.startswith("$(", here):
                here = self._balanced(here + 1, "(", ")")
            else:
                here += 2 if quote == '"' and self._source[here] == "\\" else 1
        return here + 1


def _merged(parts: list[Part]) -> tuple[Part, ...]:
    """Neighbouring texts of the same kind as one; empty quotes are kept where they are all there is."""
    out: list[Part] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, Text) and isinstance(last, Text) and part.quoted == last.quoted:
            out[-1] = Text(last.text + part.text, part.quoted)
        else:
            out.append(part)
    full = [part for part in out if not (isinstance(part, Text) and part.text == "")]
    return tuple(full) if full else tuple(out[:1])
