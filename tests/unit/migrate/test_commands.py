"""Tokens as commands, with the blocks around them."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from vime.errors import ConfigError
from vime.migrate.commands import Command, commands_of
from vime.migrate.lexer import Word, tokens_of

PIECES = (
    "A=( ) A+=( ' \" $ ${ } $( (( )) \\ \n ; ;; & && || | ` <<E E > 2>&1 # = a "
    "if then else elif fi for while in do done case esac { f() function ! [["
).split(" ")


def commands(source: str) -> list[Command]:
    """The commands of a script."""
    return commands_of(tokens_of(source, "s"))


def shown(command: Command) -> str:
    """A command's literal words."""
    return " ".join(str(word.literal) for word in command.words if isinstance(word, Word))


def test_commands_end_where_bash_ends_them() -> None:
    source = "a 1; b 2 && c\nd | e\nif f; then g; elif h; then i; else j; fi\nwhile k; do l; done; m &\nn"
    assert [shown(command) for command in commands(source)] == ["a 1", "b 2", *"cdefghijklmn"]


def test_a_command_knows_the_outermost_block_around_it_and_its_last_line() -> None:
    source = "a\nif b\nthen\n  for x in 1; do\n    c\n  done\nfi\nf() {\n  d\n}\n{ e; }\n( g )"
    blocks = {shown(command): command.block for command in commands(source) if command.words}
    kinds = {name: (block.kind, block.line, block.end) for name, block in blocks.items() if block is not None}
    assert kinds == {"b": ("if", 2, 7), "c": ("if", 2, 7), "d": ("function", 8, 10), "g": ("(", 12, 12)}
    assert blocks["a"] is None
    assert blocks["e"] is None


def test_what_decides_is_told_from_what_is_decided() -> None:
    decides = {shown(command): command.decides for command in commands("if ! a; then b; elif c; then d; fi\nwhile e; do f; done")}
    assert decides == {"a": True, "b": False, "c": True, "d": False, "e": True, "f": False}


def test_what_follows_a_test_or_an_or_may_not_run() -> None:
    kinds = {shown(c): c.block.kind if c.block is not None else None for c in commands("[ x ] && a\ncd y && b\nc || d\n(( 1 )) && e\nf")}
    assert (kinds["a"], kinds["b"], kinds["c"], kinds["d"], kinds["e"], kinds["f"]) == ("&&", None, None, "||", "&&", None)


def test_a_loop_names_its_variable() -> None:
    assert [
        command.loop_variable for command in commands("for x in $(ls); do a; done\nselect y in b; do c; done") if not command.words
    ] == [
        *("x", "y"),
    ]


def test_patterns_of_a_case_are_no_commands() -> None:
    assert [shown(command) for command in commands("case $x in\n a|b) c; d ;;\n (e) ( f );;\n *) g\nesac\nh")] == [*"cdfgh"]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map(" ".join))
def test_anything_is_grouped_or_refused(source: str) -> None:
    with contextlib.suppress(ConfigError):
        assert all(command.words or command.loop_variable for command in commands(source))
