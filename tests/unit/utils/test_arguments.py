"""What is found out before any owner's parser is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.config.options import Option
from vime.config.parse import own_flags
from vime.utils import arguments


def test_a_null_of_a_flag_that_nobody_has_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    option = Option(flags=("--max-num-seqs",), group="", takes="INT", default="", help="")
    monkeypatch.setattr(arguments, "options_of", lambda *names: {"vllm": [option]})
    file = tmp_path / "run.yaml"
    file.write_text("vllm-max-num-seqs: null\nvllm: {max_num_seq: null}\nlr: null\n")
    given, problems = arguments._all_given(["--config", str(file)], own_flags())
    assert given == []
    assert problems == [f"unknown flag --vllm-max-num-seq. Nearest: --vllm-max-num-seqs (vLLM). ({file}:2)"]
