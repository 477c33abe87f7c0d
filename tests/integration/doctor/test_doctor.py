"""`vime doctor` on this machine, and on this machine made worse."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rules.source import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def doctor(*flags: str, path: Path | None = None, before: Callable[[], None] | None = None) -> tuple[int, dict[str, dict[str, Any]]]:
    """(exit code, findings by name) of a real call."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, [*([path] if path else []), ROOT])))
    command = [sys.executable, "-m", "vime.cli.main", "doctor", "--json", *flags]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=580, check=False, preexec_fn=before)
    assert done.stdout.startswith("{"), done.stderr[-3000:]
    return done.returncode, {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_what_is_installed_passes_its_self_test() -> None:
    code, findings = doctor()
    unwell = [finding for finding in findings.values() if finding["state"] != "ok" and finding["part"] in ("packages", "self-test")]
    assert unwell == []
    steps = [finding for finding in findings.values() if finding["part"] == "self-test"]
    assert {step["name"] for step in steps} == {
        "tiny model", "engine: vLLM", "router", "trainer: Megatron", "trainer: forward, backward, step", "Ray cluster", "gloo all-reduce",
        "shared-memory segment", "engine and trainer",
    }  # fmt: skip
    assert code == int(any(finding["state"] == "wrong" for finding in findings.values()))  # this machine may itself be a poor one


def test_a_broken_torch_and_a_low_limit_break_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    code, findings = doctor("--quick", path=tmp_path, before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512)))
    assert code == 1
    assert findings["torch"]["state"] == "wrong"
    assert "libcudart.so.13: cannot open shared object file" in findings["torch"]["found"]
    assert findings["torch"]["cure"].endswith("-m pip install --no-deps torch==2.13.0 --force-reinstall")
    assert findings["megatron-core"]["state"] == "wrong"
    assert findings["file limit"]["state"] == "wrong"
    assert (findings["gloo"]["state"], findings["gloo"]["found"]) == ("skipped", "needs torch (see above)")
    for name in ("Python", "transformers", "aiohttp", "shared-memory segment"):
        assert findings[name]["state"] == "ok", findings[name]
