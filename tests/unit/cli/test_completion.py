"""The completion script, run by bash itself."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from vime.cli import completion
from vime.config.options import Option
from vime.errors import ConfigError

OPTIONS = {
    "vllm": [
        Option(flags=("--quantization",), group="", takes="{fp8,awq}", default="", help=""),
        Option(flags=("--port",), group="", takes="INT", default="", help="", note="is set by vime itself."),
    ],
    "router": [Option(flags=("--policy",), group="", takes="{random,round_robin}", default="", help="")],
}


def options_of(name: str) -> dict[str, list[Option]]:
    if name not in OPTIONS:
        raise ConfigError("Megatron is not installed.")
    return {name: OPTIONS[name]}


@pytest.fixture
def bash_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(completion, "options_of", options_of)
    path = tmp_path / "vime.bash"
    path.write_text(completion.script("bash"))
    return path


def completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    code = f"source {shlex.quote(str(script))}; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _vime; "
    code += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run([shutil.which("bash") or "bash", "-uc", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["vime", "tr"], ["train"]),
        (["vime", "completion", ""], ["bash", "zsh"]),
        (["vime", "train", "--rollout-batch-s"], ["--rollout-batch-size"]),
        (["vime", "train", "--lr", "1", "--vllm-quant"], ["--vllm-quantization"]),
        (["vime", "train", "--vllm-quantization", ""], ["fp8", "awq"]),
        (["vime", "train", "--router-policy", "ro"], ["round_robin"]),
        (["vime", "train", "--router-policy", "=", "ro"], ["round_robin"]),
        (["vime", "train", "--loss-type", "sf"], ["sft_loss"]),
        (["vime", "train", "--help", "=", "vl"], ["vllm"]),
        (["vime", "train", "--print"], ["--print-config"]),
        (["vime", "train", "--vllm-port"], []),
        (["vime", "train", "--prompt-data", ""], []),  # bash goes on with files
        (["vime", "plan", "--mean-prom"], ["--mean-prompt-len"]),
        (["vime", "plan", "--rollout-batch-s"], ["--rollout-batch-size"]),
        (["vime", "train", "--mean-prom"], []),
        (["vime", "version", "--"], []),
    ],
)
def test_bash_completes_commands_flags_and_words(bash_script: Path, words: list[str], offered: list[str]) -> None:
    assert completed(bash_script, *words) == offered


def test_the_zsh_script_holds_the_same_flags(bash_script: Path) -> None:
    text = completion.script("zsh")
    assert text.startswith("#compdef vime\n")
    assert "--vllm-quantization) compadd -- fp8 awq; return ;;" in text
    assert "--rollout-batch-size" in text


def test_another_shell_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes the shell, bash or zsh; got 'fish'"):
        completion.main(["fish"])
