"""The documents: their commands are of the kind that runs, their links lead somewhere."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.quickstart.make_assets import AssetSpec, make_assets
from tests.rules.source import ROOT, relative
from vime.cli.launch import help_topic
from vime.cli.plan import plan_options
from vime.config.help import topics
from vime.config.parse import own_flags
from vime.utils.arguments import parse_args

DOCUMENTS = [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("**/*.md"))]
DOCUMENTS += sorted((ROOT / "examples").glob("**/*.md"))
PLAN = ["vime", "plan"]
TRAIN = (["vime", "train"], [".venv/bin/vime", "train"], ["python", "train.py"])


def commands(document: Path) -> Iterator[tuple[str, list[str]]]:
    """(place, words) of each command in the document's bash blocks; continued lines are joined, comments dropped."""
    for block in re.finditer(r"```bash\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.group(1).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield f"{relative(document)}: {line.strip()[:80]}", words


def train_commands() -> list[tuple[str, list[str]]]:
    """(place, flags) of each training command in the documents; plans keep their first two words."""
    found = [command for document in DOCUMENTS for command in commands(document)]
    train = [(place, words[2:]) for place, words in found if words[:2] in TRAIN and len(words) > 2]
    return train + [(place, words) for place, words in found if words[:2] == PLAN and len(words) > 2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_assets(tmp_path_factory.mktemp("assets"), AssetSpec(max_positions=32768))["model"]


@pytest.mark.parametrize(("place", "flags"), train_commands(), ids=[place for place, _ in train_commands()])
def test_training_commands_parse(place: str, flags: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = help_topic(flags)
    if topic is not None:
        assert topic in ("", *topics(), *own_flags()), place
        return
    monkeypatch.chdir(tmp_path)
    for flag, value in itertools.pairwise(flags):
        if flag in ("--hf-checkpoint", "--ref-load"):
            Path(value).parent.mkdir(parents=True, exist_ok=True)
            Path(value).symlink_to(model, target_is_directory=True)
        elif flag == "--prompt-data":
            Path(value).parent.mkdir(parents=True, exist_ok=True)
            Path(value).write_text('{"input": "1+1=", "label": "2"}\n')
    if flags[:2] == PLAN:
        config = parse_args(plan_options(flags[2:])[2], planned=True)
    else:
        config = parse_args([flag for flag in flags if flag != "--dry-run"])
    assert config.data.rollout_batch_size, place


def test_every_make_target_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = [(place, words) for document in DOCUMENTS for place, words in commands(document) if words[0] == "make"]
    assert named, "the documents name no make target"
    wrong = [place for place, words in named if not {word for word in words[1:] if "=" not in word} <= targets]
    assert not wrong


def test_links_lead_to_files() -> None:
    dead = []
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target) and not (document.parent / target).exists():
                dead.append(f"{relative(document)}: {target}")
    assert not dead, "\n".join(dead)


def test_no_document_or_source_names_a_path_of_one_machine() -> None:
    home = re.compile(r"(?<![\w.])/(work|root|home/\w+|Users/\w+|opt/pypi)/")
    folders = ("vime", "tests", "examples", "scripts", "docs", "benchmarks", ".ci", "requirements")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".sh", ".txt", ".in", "")]
    wrong = []
    for path in [*files, *DOCUMENTS, ROOT / "Makefile", ROOT / "pyproject.toml"]:
        if path.is_file() and path != Path(__file__):
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="ignore").splitlines(), 1):
                if home.search(line):
                    wrong.append(f"{relative(path)}:{number}: {line.strip()[:80]}")
    assert not wrong, "\n".join(wrong)


def test_scripts_can_be_executed_and_name_their_shell() -> None:
    for path in [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]:
        assert os.access(path, os.X_OK), f"{relative(path)} is not executable"
        head = path.read_text(encoding="utf-8")
        assert head.startswith("#!/usr/bin/env bash\n"), relative(path)
        assert "set -euo pipefail" in head, relative(path)
