"""docs/migrating.md shows what `vime migrate` really says of the scripts in examples/migration."""

from __future__ import annotations

import re

import pytest

from examples.migration.__main__ import BLOCK, PAGE, page_with_outputs
from tests.rules.source import ROOT
from vime.migrate.hooks import new_path
from vime.migrate.megatron import MegatronFlags


def test_the_outputs_in_the_document_are_those_of_the_tool(megatron: MegatronFlags, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = PAGE.read_text(encoding="utf-8")
    assert [match["script"] for match in BLOCK.finditer(page)] == ["examples/migration/slime_grpo.sh", "examples/migration/vime_tools.sh"]
    assert page_with_outputs(page, megatron) == page, "run: python -m examples.migration"


def test_the_imports_in_the_document_exist_here() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Imports")[2].partition("\n## ")[0]
    named = {path for path in re.findall(r"`(slime\.[\w.]+)`", table) if path.count(".") > 2}
    assert len(named) >= 4
    assert not [path for path in named if new_path(path) is None]
    for module, *names in (("base_types", "RolloutFnTrainOutput", "RolloutFnEvalOutput"), ("data_source", "DataSource")):
        assert all(new_path(f"slime.rollout.{module}.{name}") for name in names)
