"""Prompt files are looked at before anything starts, and quickly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.rollout.support import make_args
from vime.errors import ConfigError, DataError
from vime.rollout.check import check_prompt_files


@pytest.fixture
def good(tmp_path: Path) -> str:
    """A file that is all right."""
    file = tmp_path / "good.jsonl"
    file.write_text('{"input": "1+1=", "label": "2"}\n')
    return str(file)


@pytest.fixture
def bad(tmp_path: Path) -> str:
    """A file whose second row lacks the label."""
    file = tmp_path / "bad.jsonl"
    file.write_text('{"input": "1+1=", "label": "2"}\n{"input": "1+1="}\n')
    return str(file)


def test_good_files_pass(good: str) -> None:
    check_prompt_files(make_args(prompt_data=good, label_key="label", rm_type="math", eval_prompt_data=["held", good]))


def test_a_bad_row_of_the_prompts_or_of_a_held_out_file_is_named(good: str, bad: str) -> None:
    with pytest.raises(DataError, match=r"bad\.jsonl:2"):
        check_prompt_files(make_args(prompt_data=bad, label_key="label", rm_type="math"))
    with pytest.raises(DataError, match=r"bad\.jsonl:2"):
        check_prompt_files(make_args(prompt_data=good, label_key="label", rm_type="math", eval_prompt_data=["held", bad]))


def test_an_unknown_reward_is_refused(good: str) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        check_prompt_files(make_args(prompt_data=good, rm_type="deepscaller"))


def test_the_check_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, vime.rollout.check, vime.rollout.vllm_rollout; print(sorted({'torch', 'transformers', 'sympy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
