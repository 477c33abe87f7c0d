"""Tokens as simple commands, each with the block (if, loop, function, ...) that decides whether it runs at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vime.migrate.lexer import Array, Op, Substitution, Token, Word

__all__ = ["Block", "Command", "commands_of"]

_OPENING = {"if": "fi", "while": "done", "until": "done", "for": "done", "select": "done", "case": "esac", "{": "}"}
_BETWEEN = ("then", "else", "elif", "do", "in", "!", "time")
_TESTS = ("[", "[[", "test", "command", "grep", "which")
_REDIRECTIONS = ("<", ">", ">>", ">&", "<&", "&>", "&>>", ">|", "<>", "<<<")


@dataclass(slots=True)
class Block:
    """A compound command; commands inside run or do not, or run several times."""

    kind: str  # if, while, until, for, select, case, function, ( or &&
    line: int
    end: int = 0  # its last line, known once it was read
    head: bool = False  # what is read now decides whether the rest runs


@dataclass(slots=True)
class Command:
    """One simple command: assignments, then words; redirections are left out."""

    words: list[Word | Array] = field(default_factory=list)
    line: int = 0
    block: Block | None = None  # the outermost block around it
    piped: bool = False  # takes its input from the command before
    decides: bool = False  # its result is all that counts: the command after if or while
    loop_variable: str | None = None  # a loop's head: this is what it sets


def commands_of(tokens: Sequence[Token]) -> list[Command]:
    """The commands of a script, in order."""
    return _Grouper(tokens).run()


class _Grouper:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens, self._at = tokens, 0
        self._open: list[tuple[str, Block]] = []  # (what closes it, block)
        self._out: list[Command] = []
        self._command = Command()
        self._after: str = "\n"  # the operator before this command
        self._pattern = False  # what comes up to the next ")" is a pattern of a case
        self._function = False  # a function's name was read, its body follows
        self._guard: Block | None = None  # the chain a && b, of which a decides whether b runs

    def run(self) -> list[Command]:
        """All commands."""
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            self._at += 1
            if self._pattern and not (isinstance(token, Word) and token.bare == "esac"):
                self._pattern = not (isinstance(token, Op) and token.text == ")")
            elif isinstance(token, Op):
                self._operator(token)
            elif not self._command.words and isinstance(token, Word) and self._keyword(token):
                continue
            else:
                if not self._command.words:
                    self._command.line = token.line
                self._command.words.append(token)
        self._finish("\n", 0)
        return self._out

    def _operator(self, op: Op) -> None:
        if op.text in _REDIRECTIONS:
            self._at += isinstance(self._tokens[self._at], Word) if self._at < len(self._tokens) else 0
        elif op.text in ("<<", "<<-"):
            return
        elif op.text == "(" and not self._command.words:
            self._push("(", ")", op.line)
        elif op.text == "(":  # name ( ) { ... }
            self._command = Command()
            self._at += 1
            self._function = True
        else:
            self._finish(op.text, op.line)
            self._pattern = op.text in (";;", ";&", ";;&")
            if op.text == ")" and self._open and self._open[-1][0] == ")":
                self._pop(op.line)

    def _keyword(self, word: Word) -> bool:
        """Whether a word at a command's beginning is part of a compound command's frame."""
        text = word.bare
        if text == "function":
            self._at += 1
            self._function = True
        elif text == "{" and self._function:
            self._function = False
            self._push("function", "}", word.line)
        elif text in ("for", "select", "case"):
            self._push(text, _OPENING[text], word.line)
            self._head(text, word.line)
        elif text in _OPENING:
            self._push(text, _OPENING[text], word.line)
        elif self._open and text == self._open[-1][0]:
            self._pop(word.line)
        elif text in _BETWEEN:
            if self._open:
                self._open[-1][1].head = text == "elif" or (text == "!" and self._open[-1][1].head)
        else:
            return False
        return True

    def _head(self, kind: str, line: int) -> None:
        """Pass over the words after for, select or case."""
        first = self._tokens[self._at] if self._at < len(self._tokens) else None
        if kind != "case" and isinstance(first, Word) and first.bare is not None:
            self._out.append(Command(line=line, block=self._open[0][1], loop_variable=first.bare))
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            self._at += 1
            if isinstance(token, Op) and token.text in ("\n", ";"):
                return
            if kind == "case" and isinstance(token, Word) and token.bare == "in":
                self._pattern = True
                return

    def _push(self, kind: str, closing: str, line: int) -> None:
        self._open.append((closing, Block(kind if kind != "{" else "group", line, head=kind in ("if", "while", "until"))))

    def _pop(self, line: int) -> None:
        self._pattern = False
        self._open.pop()[1].end = line

    def _finish(self, operator: str, line: int) -> None:
        command, self._command = self._command, Command()
        if command.words:
            outer = next((block for _, block in self._open if block.kind != "group"), None)
            if self._after == "||" or (self._after == "&&" and self._guard is not None):
                command.block = outer or self._guard or Block("||", command.line, line)
            else:
                command.block = outer
            command.decides = any(block.head for _, block in self._open)
            command.piped = self._after in ("|", "|&")
            self._out.append(command)
            first = command.words[0]
            if isinstance(first, Word) and (first.bare in _TESTS or isinstance(first.parts[0], Substitution)):
                self._guard = Block("&&", command.line, line)
            elif operator not in ("&&", "||"):
                self._guard = None
        elif operator == "\n" and self._after in ("&&", "||", "|", "|&"):
            return  # a chain may go on in the next line
        self._after = operator
