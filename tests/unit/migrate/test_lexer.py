"""Bash as words and operators."""

from __future__ import annotations

import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.errors import ConfigError
from vime.migrate.lexer import Array, Expansion, Op, Substitution, Text, Word, tokens_of


def words(source: str) -> list[str | None]:
    """The literal texts of a line's words."""
    return [token.literal for token in tokens_of(source, "s") if isinstance(token, Word)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a b  c", ["a", "b", "c"]),
        ("a 'b  c' \"d e\"", ["a", "b  c", "d e"]),
        ("a\\ b c\\\n d", ["a b", "c", "d"]),
        ("--x='{\"k\": 1}'", ['--x={"k": 1}']),
        ("a # b\nc", ["a", "c"]),
        ("a#b", ["a#b"]),
        ('"say \\"hi\\" \\$5 \\n"', ['say "hi" $5 \\n']),
        ("$'a\\tb\\'c'", ["a\tb'c"]),
        ("'' x", ["", "x"]),
        ('"one \\\ntwo"', ["one two"]),
        ("a$ b", ["a$", "b"]),
    ],
)
def test_quotes_escapes_and_comments_are_read_as_bash_reads_them(source: str, expected: list[str]) -> None:
    assert words(source) == expected


def test_what_the_shell_would_expand_is_kept_apart_with_its_quotes() -> None:
    (word,) = tokens_of('a$B"${C:-x y}"$(cat "f)")`d`$((1 + 2))', "s")
    assert isinstance(word, Word)
    assert word.parts == (
        Text("a", False),
        Expansion("B", False),
        Expansion("C:-x y", True),
        Substitution('$(cat "f)")', False),
        Substitution("`d`", False),
        Substitution("$((1 + 2))", False),
    )
    assert word.literal is None


def test_nested_braces_end_where_they_end() -> None:
    (word,) = tokens_of('${A:-${B:-"}"}}', "s")
    assert isinstance(word, Word)
    assert word.parts == (Expansion('A:-${B:-"}"}', False),)


def test_an_array_holds_its_words_without_comments() -> None:
    (array,) = tokens_of("X+=(\n  --a 1 # note\n  #--b 2\n\n  '--c d'\n)", "s")
    assert isinstance(array, Array)
    assert (array.name, array.append, array.line) == ("X", True, 1)
    assert [(word.literal, word.line) for word in array.words] == [("--a", 2), ("1", 2), ("--c d", 5)]


def test_operators_end_words_and_lines_are_counted() -> None:
    tokens = tokens_of("a&&b|c;d\n\ne", "s")
    assert [token.text for token in tokens if isinstance(token, Op)] == ["&&", "|", ";", "\n", "\n"]
    assert [token.line for token in tokens if isinstance(token, Word)] == [1, 1, 1, 1, 3]


@pytest.mark.parametrize("opening", ["<<END", "<<'END'", "<<-END", '<< "END"'])
def test_the_body_of_a_here_document_is_no_script(opening: str) -> None:
    body = "\tEND" if opening == "<<-END" else "END"
    assert words(f"cat {opening} > f\npython train.py 'open\n{body}\nnext") == ["cat", "f", "next"]


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("a\nb 'c", "line 2: a single quote"),
        ('a "b', "line 1: a double quote"),
        ("\n\nX=(a b", "line 3: the array 'X=('"),
        ("echo ${A", "'{' that is not closed"),
        ("echo $(a", "'(' that is not closed"),
        ("echo `a", "a backtick"),
        ("X=(a; b)", "';' inside the array 'X=('"),
    ],
)
def test_what_is_never_closed_is_named_with_its_line(source: str, what: str) -> None:
    with pytest.raises(ConfigError) as error:
        tokens_of(source, "run.sh")
    assert str(error.value).startswith("run.sh line")
    assert what in str(error.value)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), max_size=5))
def test_quoted_words_come_back_whatever_they_hold(texts: list[str]) -> None:
    assert words(shlex.join(texts)) == texts
    (array,) = tokens_of(f"A=({shlex.join(texts)})", "s")
    assert isinstance(array, Array)
    assert [word.literal for word in array.words] == texts


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60))
def test_any_text_is_read_or_refused_with_a_line(text: str) -> None:
    message = "run.sh line 1: nothing"
    try:
        tokens_of(text, "run.sh")
    except ConfigError as error:
        message = str(error)
    assert re.match(r"run\.sh line \d+: ", message)
