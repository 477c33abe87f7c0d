"""Prompt files are looked at before anything starts, and quickly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("row", "flags", "said"),
    [
        ({"metadata": {"rm_type": "exakt"}}, {}, r"there is no such reward; did you mean exact\?"),
        ({}, {}, "no reward: the row has no metadata"),
        ({}, {"rm_type": "reasoning_gym"}, r"reward 'reasoning_gym' needs metadata \{\"reasoning_gym\""),
        ({"metadata": {"reasoning_gym": {"dataset": "x", "entry": "y"}}}, {"rm_type": "reasoning_gym"}, "needs an object .* got str"),
        ({"metadata": {"reasoning_gym": {"dataset": "x"}}}, {"rm_type": "boxed_reasoning_gym"}, "or a label: its answer"),
        ({"label": ""}, {"rm_type": "gpqa", "label_key": "label"}, "needs a label, or the right letter"),
        ({"metadata": {"rm_type": "remote_rm"}}, {"rm_type": "random"}, "needs an address"),
        (
            {"metadata": {"rm_type": "dapo"}, "label": "2"},
            {"label_key": "label"},
            "and --reward-key is not given",
        ),
        ({"metadata": {"rm_type": "dapo"}, "label": "2"}, {"label_key": "label", "reward_key": "x"}, "--reward-key is x: name one of them"),
    ],
)
def test_a_row_without_what_its_reward_needs_is_named(tmp_path: Path, row: dict[str, Any], flags: dict[str, Any], said: str) -> None:
    file = tmp_path / "rows.jsonl"
    good = {"input": "1+1=", "label": "2", "metadata": {"rm_type": "random"}}
    file.write_text(json.dumps(good) + "\n" + json.dumps({"input": "1+1=", **row}) + "\n")
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{said}"):
        check_prompt_files(make_args(prompt_data=str(file), **flags))


def test_rows_are_not_held_to_a_reward_that_will_not_score_them(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "1+1=", "metadata": {"rm_type": "mine"}}\n')
    check_prompt_files(make_args(prompt_data=str(file), custom_rm_path="a.b"))
    check_prompt_files(make_args(prompt_data=str(file), rollout_function_path="a.b"))
    with pytest.raises(DataError, match="no such reward"):
        check_prompt_files(make_args(prompt_data=str(file)))


def test_rows_with_what_their_rewards_need_pass(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    metadata: list[dict[str, Any]] = [
        {"rm_type": "reasoning_gym", "reasoning_gym": {"dataset": "x", "entry": {"answer": "2"}}},
        {"rm_type": "gpqa", "correct_letter": "B"},
        {"rm_type": "remote_rm", "rm_url": "http://127.0.0.1:1/"},
        {"rm_type": "random"},
    ]
    file.write_text("".join(json.dumps({"input": "1+1=", "metadata": one}) + "\n" for one in metadata))
    check_prompt_files(make_args(prompt_data=str(file)))


def test_an_unknown_reward_is_refused(good: str) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        check_prompt_files(make_args(prompt_data=good, rm_type="deepscaller"))


def test_a_reward_key_without_a_reward_that_has_entries_is_refused(good: str, tmp_path: Path) -> None:
    rows = {"prompt_data": good, "label_key": "label"}
    with pytest.raises(ConfigError, match="--reward-key score has no effect: the rewards of these prompts are numbers"):
        check_prompt_files(make_args(**rows, rm_type="math", reward_key="score"))
    with pytest.raises(ConfigError, match="--eval-reward-key acc has no effect"):
        check_prompt_files(make_args(**rows, rm_type="math", eval_prompt_data=["held", good], eval_reward_key="acc"))
    check_prompt_files(make_args(**rows, rm_type="dapo", reward_key="score", eval_prompt_data=["held", good], eval_reward_key="acc"))
    check_prompt_files(make_args(**rows, rm_type="math", reward_key="score", custom_generate_function_path="a.b"))
    check_prompt_files(make_args(**rows, custom_rm_path="a.b", reward_key="score"))
    mixed = tmp_path / "mixed.jsonl"
    kinds = ({"rm_type": "dapo"}, {"rm_type": "math"})
    mixed.write_text("".join(json.dumps({"input": "1+1=", "label": "2", "metadata": kind}) + "\n" for kind in kinds))
    check_prompt_files(make_args(prompt_data=str(mixed), label_key="label", reward_key="score"))


def test_the_check_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, vime.rollout.check, vime.rollout.vllm_rollout; print(sorted({'torch', 'transformers', 'sympy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
