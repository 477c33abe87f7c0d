"""Unknown flags: each name of ours one edit away is caught, and the right one is among the suggestions."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from vime.config import suggest
from vime.config.names import NameIndex
from vime.config.options import Option
from vime.config.parse import flag_table, own_flags
from vime.config.sources import flags_in
from vime.config.split import by_owner, read_tokens
from vime.config.suggest import Names

LETTERS = "abcdefghijklmnopqrstuvwxyz-_0"


def option(*flags: str, note: str = "") -> Option:
    return Option(flags=flags, group="", takes="", default="", help="", note=note)


NAMES = Names(
    {
        "megatron": [
            option("--tensor-model-parallel-size"),
            option("--weight-decay"),
            option("--data-path", note="--data-path has no effect."),
        ],
        "vllm": [
            option("--max-num-seqs"),
            option("--enable-prefix-caching", "--no-enable-prefix-caching"),
            option("--dtype", note="is set by vime itself: leave it out."),
        ],
        "router": [option("--policy"), option("--cb-failure-threshold"), option("--port", note="is set by vime itself: leave it out.")],
    }
)


def edits(name: str, rng: random.Random) -> Iterator[str]:
    """Every deletion and swap, and at each place one insertion and one replacement."""
    for i in range(len(name)):
        yield name[:i] + name[i + 1 :]
        yield name[:i] + rng.choice(LETTERS) + name[i:]
        yield name[:i] + rng.choice(LETTERS) + name[i + 1 :]
        yield name[:i] + name[i : i + 2][::-1] + name[i + 2 :]
    yield name + rng.choice(LETTERS)


def edited_flags() -> Iterator[tuple[str, str]]:
    """(a flag of ours, the same one edit away, which is no other flag of ours)."""
    flags, rng = own_flags(), random.Random(0)
    for flag in flag_table():
        yield from ((flag, wrong) for wrong in sorted(set(edits(flag, rng)) - set(flags)))


def test_each_flag_of_ours_one_edit_away_is_caught_and_the_right_one_is_suggested() -> None:
    flags, walked = own_flags(), 0
    index = NameIndex(flags)
    for flag, wrong in edited_flags():
        walked += 1
        given, problems = read_tokens(["--rollout-stop", "a", "b", wrong, "1"], index)
        if problems:  # it does not even look like a flag
            assert any(flag in problem for problem in problems), (flag, wrong, problems)
            continue
        (_, other) = given
        assert by_owner([other], flags).own == [], (flag, wrong)
        said = NAMES.explain(other.flag)
        assert f"{flag} (vime, " in said, (flag, wrong, said)
    assert walked > 50 * len(flag_table())


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--vllm-router-policy", "it is spelled --router-policy here."),
        ("--vllm-router-cb-failure-threshold", "--router-cb-failure-threshold (vllm-router)"),
        ("--sglang-no-such-thing", "Engines are vLLM's"),
        ("--router-ip", "--vllm-router-ip (vime, router)"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size (Megatron), an engine's is --rollout-num-gpus-per-engine"),
        ("--vllm-tensor-parallel-siz", "unknown flag --vllm-tensor-parallel-siz"),
        ("--max-num-seqs", "--vllm-max-num-seqs (vLLM)"),
        ("--enable-prefix-caching", "--vllm-enable-prefix-caching (vLLM)"),
        ("--vllm-lr", "--lr (vime, training)"),
        ("--router-weight-decay", "--weight-decay (Megatron)"),
        ("--sglang-max-num-seqs", "--vllm-max-num-seqs (vLLM)"),
        ("--sglang-mem-fraction-static", "it is spelled --vllm-gpu-memory-utilization here."),
        ("--rollout_batch_size", "names have dashes and small letters here: --rollout-batch-size"),
        ("--temperature", "--rollout-temperature"),
        ("--vllm-max-num-seq", "Nearest: --vllm-max-num-seqs (vLLM)."),
        ("--no-vllm-enable-prefix-cachin", "Nearest: --no-vllm-enable-prefix-caching (vLLM)."),
        ("--router-polcy", "Nearest: --router-policy (vllm-router)."),
        ("--weight-deca", "Nearest: --weight-decay (Megatron)."),
        ("--dtype", "that would be --vllm-dtype, which is set by vime itself: leave it out."),
        ("--vllm-dtyp", "Nearest: --vllm-dtype, which is set by vime itself: leave it out."),
        ("--learning-rate", "it is --lr."),
        ("--megatron-num-epochs", "it is --num-rollout, or --num-epoch over the prompts."),
        ("--print-config", "--print-config is for the command line of `vime train` alone."),
        ("--print-confg", "Nearest: --print-config (vime)."),
        ("--qwertyuiop", "nobody has one like it"),
    ],
)
def test_what_was_meant_is_said_with_its_owner(flag: str, said: str) -> None:
    assert said in NAMES.explain(flag)
    assert NAMES.explain(flag).startswith(f"unknown flag {flag}")


def test_the_flags_that_are_advised_exist_and_the_names_are_none_of_them() -> None:
    advised = {flag for text in suggest._MEANT for flag in flags_in(text)}
    assert advised <= {*flag_table(), "--tensor-model-parallel-size"}
    assert not {f"--{name}" for name in suggest._EXPLAINED} & set(flag_table())
    assert len(suggest._EXPLAINED) == sum(len(names.split()) for names in suggest._MEANT.values()), "a name stands twice"


def test_a_suggestion_that_is_not_available_yet_says_so() -> None:
    flag, section = next((flag, section) for flag, (section, spec) in flag_table().items() if spec.not_yet)
    assert f"{flag} (vime, {section}, not available yet)" in NAMES.explain(flag + "x")


def test_flags_that_would_be_refused_next_are_no_suggestion() -> None:
    assert "--data-path (" not in NAMES.explain("--data-pat")


def test_one_edit_is_a_deletion_an_insertion_a_replacement_or_a_swap() -> None:
    index = NameIndex(["abcd", "abdc", "xyz"])
    for word in ("abcd", "abc", "abcde", "abxd", "bacd"):
        assert "abcd" in index.one_edit(word)
    assert index.one_edit("abcd") == ["abcd", "abdc"]
    for word in ("ab", "abxy", "badc", "dbca", ""):
        assert "abcd" not in index.one_edit(word)
    assert NameIndex(["a", ""]).one_edit("b") == ["a", ""]
