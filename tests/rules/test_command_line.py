"""Command lines: no parser of ours takes abbreviations, which would change meaning when a flag is added."""

from __future__ import annotations

import ast

from tests.rules.source import ROOT, relative


def test_no_parser_takes_abbreviations() -> None:
    wrong = []
    for path in sorted((ROOT / "vime").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ArgumentParser"):
                said = {word.arg: ast.unparse(word.value) for word in node.keywords}
                if said.get("allow_abbrev") != "False" and "Flexible" not in ast.unparse(node.func):  # vLLM's: parse_all forbids them
                    wrong.append(f"{relative(path)}:{node.lineno}")
    assert not wrong, f"say allow_abbrev=False: {wrong}"
