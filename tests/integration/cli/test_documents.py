"""docs/command_line.md: what it shows is what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from examples.quickstart.make_assets import AssetSpec, make_assets
from tests.rules.source import ROOT
from vime.cli.main import main

pytestmark = pytest.mark.integration
TEXT = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```console\n\$ vime (.*?)\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the document speaks of."""
    path = tmp_path_factory.mktemp("run")
    (path / "model").symlink_to(make_assets(path / "assets", AssetSpec())["model"], target_is_directory=True)
    (path / "sums.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    files = re.findall(r"```(?:yaml|toml)\n# (\S+)\n(.*?)```", TEXT, re.DOTALL)
    assert [name for name, _ in files] == ["run.yaml", "longer.toml"]
    for name, text in files:
        (path / name).write_text(f"# {name}\n{text}")
    return path


def matches(shown: list[str], printed: list[str]) -> bool:
    """Whether the lines are the same; "..." stands for any lines."""
    pattern = "".join("(.*\n)*?" if line == "..." else re.escape(line) + "\n" for line in shown)
    return re.fullmatch(pattern, "".join(line + "\n" for line in printed)) is not None


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command[:40] for command, _ in SHOWN])
def test_a_shown_command_prints_what_is_shown(
    command: str, shown: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    code = main(shlex.split(command))
    out, err = capsys.readouterr()
    assert code == (2 if "problem" in shown else 0)
    assert matches(shown.splitlines(), (out + err).splitlines()), out + err


def test_lines_may_be_left_out_only_where_dots_stand() -> None:
    assert matches(["a", "...", "d"], ["a", "b", "c", "d"])
    assert matches(["...", "d"], ["d"])
    assert not matches(["a", "d"], ["a", "b", "d"])
    assert not matches(["a", "..."], ["b"])
