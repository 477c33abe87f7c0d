"""Engine and router flags, checked by the parsers that own them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from vime.backends.vllm_utils import arguments


def test_router_flags_that_its_parser_takes_are_no_problem() -> None:
    assert arguments.check_router(["--policy", "power_of_two", "--cb-failure-threshold", "3"]) == []


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["--polcy", "random"], "unknown flag --router-polcy."),
        (["--port", "3"], "--router-port is set by vime itself: use --vllm-router-port"),
        (["--policy", "best"], "argument --router-policy: invalid choice: 'best'"),
        (["--wasm-middleware-sha256", "00"], "wasm_middleware_sha256 requires wasm_middleware"),
        (["--help"], "--router-help is set by vime itself"),
        (["--balance-abs-threshold", "-4"], "--router-balance-abs-threshold -4: vllm-router refuses it: can't convert negative int"),
        (["--O3"], "unknown flag --router-O3."),
    ],
)
def test_router_flags_that_are_wrong_are_told_in_the_users_spelling(tokens: list[str], said: str) -> None:
    assert said in arguments.check_router(tokens)[0]


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["--model", "x"], "--vllm-model is set by vime itself: use --hf-checkpoint."),
        (["--tensor_parallel_size=2"], "--vllm-tensor-parallel-size is set by vime itself: use --rollout-num-gpus-per-engine."),
        (["--weight-transfer-config.backend", "nccl"], "--vllm-weight-transfer-config is set by vime itself"),
    ],
)
def test_engine_flags_that_are_ours_are_told_without_asking_vllm(tokens: list[str], said: str) -> None:
    assert said in arguments.check_vllm(tokens)[0]


def test_what_vllm_accepted_once_is_remembered_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []

    def parser() -> object:
        import argparse

        asked.append(1)
        made = argparse.ArgumentParser(allow_abbrev=False)
        made.add_argument("--model")
        made.add_argument("--max-num-seqs", type=int)
        return made

    monkeypatch.setattr(arguments, "_vllm_parser", parser)
    monkeypatch.setattr(arguments, "_vllm_bounds", lambda: {"max_num_seqs": Annotated[int, Field(ge=1)]})
    assert arguments.check_vllm(["--max-num-seqs", "-1"]) == [
        "--vllm-max-num-seqs -1: vLLM refuses it: it should be greater than or equal to 1."
    ]
    asked.clear()
    assert arguments.check_vllm(["--max-num-seqs", "64"]) == []
    assert arguments.check_vllm(["--max-num-seqs", "64"]) == []
    assert len(asked) == 1
    assert arguments.check_vllm(["--max-num-seqs", "many"]) == ["argument --vllm-max-num-seqs: invalid int value: 'many'"]
    assert arguments.check_vllm(["--max-num-seqs", "many"]) != []
    assert len(asked) == 3
    said = arguments.check_vllm(["--max-num-seq", "64", "--max-num-seqs", "many", "--port", "1"])
    assert said == [
        "--vllm-port is set by vime itself: leave it out (a free port is found).",
        "unknown flag --vllm-max-num-seq.",
        "argument --vllm-max-num-seqs: invalid int value: 'many'",
    ]


def test_a_torn_cache_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "vime").mkdir()
    (tmp_path / "vime" / "vllm_accepted.json").write_text('{"key": ')
    assert not arguments._Cache().accepted(["--max-num-seqs", "1"])


def test_the_command_prints_one_problem_a_line_and_exits_with_2() -> None:
    command = [sys.executable, "-m", "vime.backends.vllm_utils.arguments", "vllm", "--model", "x", "--port", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "--vllm-model is set by vime itself: use --hf-checkpoint.",
        "--vllm-port is set by vime itself: leave it out (a free port is found).",
    ]
