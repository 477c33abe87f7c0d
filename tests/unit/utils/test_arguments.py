"""What is found out before any owner's parser is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.config.options import Option
from vime.config.parse import own_flags
from vime.errors import ConfigError
from vime.utils import arguments


def test_a_null_of_a_flag_that_nobody_has_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    option = Option(flags=("--max-num-seqs",), group="", takes="INT", default="", help="")
    monkeypatch.setattr(arguments, "options_of", lambda *names: {"vllm": [option]})
    file = tmp_path / "run.yaml"
    file.write_text("vllm-max-num-seqs: null\nvllm: {max_num_seq: null}\nlr: null\n")
    given, problems = arguments._all_given(["--config", str(file)], own_flags())
    assert given == []
    assert problems == [f"unknown flag --vllm-max-num-seq. Nearest: --vllm-max-num-seqs (vLLM). ({file}:2)"]


def test_of_a_file_that_cannot_be_read_nothing_is_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "torn.yaml").write_text("lr: [1")
    with pytest.raises(ConfigError) as caught:
        arguments.parse_args(["--config", str(tmp_path / "none.yaml"), str(tmp_path / "torn.yaml"), "--lr"])
    problems = caught.value.problems
    assert len(problems) == 2
    assert "none.yaml' cannot be read: No such file" in problems[0]
    assert "torn.yaml is no YAML" in problems[1]
