"""Writes what `vime migrate` says of the two scripts here into docs/migrating.md:  python -m examples.migration"""

from __future__ import annotations

import re
from pathlib import Path

from vime.migrate.convert import convert
from vime.migrate.megatron import MegatronFlags
from vime.migrate.script import read_script
from vime.migrate.write import report, run_sh

__all__ = ["page_with_outputs"]

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
BLOCK = re.compile(r"(<!-- vime migrate (?P<script>\S+) -->\n```text\n).*?(```\n)", re.DOTALL)
CHANGING = "not yet"  # this part of the report gets shorter with each version


def page_with_outputs(page: str, megatron: MegatronFlags) -> str:
    """The page with each block's output made anew. Scripts are named relative to the current folder, the repository's."""
    return BLOCK.sub(lambda match: match[1] + _output(match["script"], megatron) + match[3], page)


def _output(script: str, megatron: MegatronFlags) -> str:
    command, notes = convert(read_script(script), megatron=megatron, device="cuda")
    return f"{run_sh(command)}\n{report([note for note in notes if note.kind != CHANGING])}"


if __name__ == "__main__":
    PAGE.write_text(page_with_outputs(PAGE.read_text(encoding="utf-8"), MegatronFlags()), encoding="utf-8")
