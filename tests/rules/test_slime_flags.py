"""Every flag of slime and Vime has a meaning here or an answer: slime_flags.txt lists their names."""

from __future__ import annotations

import re

from tests.rules.source import ROOT
from vime.backends.vllm_utils.arguments import OWNED_ROUTER, OWNED_VLLM
from vime.config.parse import flag_table
from vime.config.renamed import GONE, GONE_PREFIXES, MEGATRON, RENAMED, explained

THEIRS = (ROOT / "tests" / "rules" / "slime_flags.txt").read_text(encoding="utf-8").split()
OWN = flag_table()


def test_the_list_is_sorted() -> None:
    assert sorted(set(THEIRS)) == THEIRS


def test_each_flag_of_theirs_is_ours_or_an_owners_or_explained() -> None:
    wrong = []
    for flag in THEIRS:
        answers = [flag in OWN, flag in MEGATRON, explained(flag) is not None]
        family = flag.startswith(("--vllm-", "--router-"))  # whose own parser knows its names
        if sum(answers) != 1 and not (family and not any(answers)):
            wrong.append(flag)
    assert not wrong, f"none or several answers: declare them, or add rows to vime/config/renamed.py: {wrong}"


def test_what_is_gone_or_renamed_is_no_flag_of_ours() -> None:
    assert not [flag for flag in (*GONE, *RENAMED, *MEGATRON) if flag in OWN]
    assert not [flag for flag in OWN if flag.startswith(tuple(GONE_PREFIXES))]


def test_a_new_name_exists_and_is_not_refused() -> None:
    for old, new in RENAMED.items():
        if new in OWN:
            continue
        family, owned = ("--router-", OWNED_ROUTER) if new.startswith("--router-") else ("--vllm-", OWNED_VLLM)
        positive = new.replace("--no-vllm-", "--vllm-")
        assert positive.startswith(family), f"{old}: nobody has {new}"
        assert "--" + positive.removeprefix(family) not in owned, f"{old}: {new} is refused"


def test_the_flags_that_a_row_advises_exist() -> None:
    for old, why in (GONE | GONE_PREFIXES).items():
        for name in re.findall(r"--[a-z][\w-]*", why):
            assert name in OWN or name.startswith("--vllm-") or name in ("--config", "--help"), f"{old}: its row advises {name}"
