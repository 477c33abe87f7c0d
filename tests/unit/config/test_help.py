"""Help: all of ours by section; one section, one flag, or another owner's options with our prefix."""

from __future__ import annotations

import pytest

from vime.config import SECTIONS
from vime.config import help as help_module
from vime.config.help import help_text, topic_text, topics
from vime.config.options import Option
from vime.config.owners import OWNERS
from vime.config.parse import flag_table
from vime.errors import ConfigError

OPTIONS = [
    Option(flags=("--max-num-seqs",), group="Scheduler", takes="INT", default="128", help="Most sequences."),
    Option(flags=("--enforce-eager", "--no-enforce-eager"), group="Model", takes="", default="", help=""),
    Option(flags=("--port",), group="Server", takes="INT", default="8000", help="", note="is set by vime itself: leave it out."),
]


@pytest.fixture(autouse=True)
def owners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(help_module, "options_of", lambda *names: {name: OPTIONS if name == "vllm" else OPTIONS[2:] for name in names})


def test_help_names_every_flag_with_its_doc_under_its_section() -> None:
    text = help_text()
    blocks = {block.partition(":")[0]: block for block in text.split("\n\n")}
    for flag, (section, spec) in flag_table().items():
        assert f"  {flag}" in blocks[section]
        assert spec.doc in blocks[section]
    assert "--lr FLOAT\n      Learning rate. (>= 0) [1e-06]" in text


@pytest.mark.parametrize("topic", [*SECTIONS, "weight-update"])
def test_a_section_is_a_topic(topic: str) -> None:
    assert topic_text(topic).startswith(topic.replace("-", "_") + ": ")


def test_an_owners_options_are_given_with_our_prefix_by_group() -> None:
    lines = topic_text("vllm").splitlines()
    assert lines[0] == "vllm: vLLM's own flags, given as --vllm-X"
    at = lines.index(" Scheduler:")
    assert lines[at : at + 3] == [" Scheduler:", "  --vllm-max-num-seqs INT", "      Most sequences. [128]"]
    assert "  --vllm-enforce-eager, --no-vllm-enforce-eager" in lines
    assert not [line for line in lines if "--vllm-port" in line]
    assert lines[-1].startswith("1 more cannot be given here")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--lr", "--lr (vime, section training)"),
        ("--no-use-kl-loss", "--no-use-kl-loss takes back what a file says."),
        ("--vllm-max-num-seqs", "--vllm-max-num-seqs (vLLM)"),
        ("--no-vllm-enforce-eager", "(no description)"),
        ("--vllm-port", "It is set by vime itself: leave it out."),
        ("--router-port", "--router-port (vllm-router)"),
        ("--print-config", "Print every value with its source"),
    ],
)
def test_a_flag_is_a_topic(flag: str, said: str) -> None:
    assert said in topic_text(flag)


def test_a_topic_that_is_none_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"--help=nothing: no such topic. There are megatron, vllm, router, cluster"):
        topic_text("nothing")
    with pytest.raises(ConfigError, match=r"--help=--max-num-seqs: unknown flag --max-num-seqs.*--vllm-max-num-seqs"):
        topic_text("--max-num-seqs")


def test_topics_are_sections_and_owners() -> None:
    assert set(topics()) == {*SECTIONS, *OWNERS}
