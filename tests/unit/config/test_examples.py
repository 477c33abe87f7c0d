"""Every command line of examples/: our own part parses here; all of it is parsed in tests/integration and by `vime migrate`'s tests."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.multi_agent.__main__ import flags as multi_agent_flags
from examples.quickstart.recipe import grpo_flags, sft_flags
from tests.rules.source import ROOT
from vime.config.files import layered, read_file
from vime.config.names import NameIndex
from vime.config.parse import own_flags, parse_own
from vime.config.split import Given, by_owner, read_tokens

EXAMPLES = ROOT / "examples"
OWN = own_flags()
THEIRS = {"migration"}  # launch scripts of slime's and Vime's: tests/unit/migrate rewrites them
FUNCTIONS = {"plugins"}  # functions alone


def typed(argv: list[str]) -> list[Given]:
    given, problems = read_tokens(argv, NameIndex(OWN))
    assert problems == []
    return given


def command_lines() -> Iterator[tuple[str, list[Given]]]:
    """(place, what is given) of recipes, files of flags and shell scripts."""
    yield "quickstart: SFT", typed(sft_flags(Path("x")))
    yield "quickstart: GRPO", typed(grpo_flags(Path("x")))
    yield "multi_agent: GRPO", typed(multi_agent_flags(Path("x")))
    for path in sorted(EXAMPLES.rglob("*")):
        place = str(path.relative_to(EXAMPLES))
        if path.suffix in (".yaml", ".yml", ".toml"):
            given, problems = read_file(str(path), OWN)
            assert problems == []
            yield place, given
        elif path.suffix == ".sh" and path.relative_to(EXAMPLES).parts[0] not in THEIRS:
            lines = path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
            for line in lines:
                if match := re.match(r"\s*(?:\S*/)?vime train (.*)", line):
                    yield place, typed(shlex.split(match[1], comments=True))


@pytest.mark.parametrize(("place", "given"), list(command_lines()), ids=[place for place, _ in command_lines()])
def test_an_examples_flags_of_ours_are_right(place: str, given: list[Given]) -> None:
    own = parse_own(by_owner(layered([given], OWN), OWN).own)
    assert own.problems == []
    assert own.given, place


def test_each_folder_of_examples_has_a_command_line() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__"}
    shown = {re.split(r"[:/]", place)[0] for place, _ in command_lines()}
    assert folders - shown == THEIRS | FUNCTIONS
