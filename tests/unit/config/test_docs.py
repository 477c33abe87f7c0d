"""The pages that are made from the sections say what the sections say."""

import re

import pytest

from tests.rules.source import ROOT
from vime.config.docs import BEGIN, END, configuration_page, made_pages, with_differences
from vime.config.parse import flag_table
from vime.config.renamed import CHANGED, GONE, RENAMED


def test_every_flag_stands_in_the_page_once():
    rows = [line for line in configuration_page().splitlines() if line.startswith("| `--")]
    flags = [flag for row in rows for flag in re.findall(r"`(--[\w-]+)`", row.split(" | ")[0])]
    assert sorted(flags) == sorted(flag_table())


def test_a_row_says_type_bound_default_and_what_is_missing():
    page = configuration_page()
    assert "| `--rollout-top-p` | number > 0, &lt;= 1 | `1.0` | Nucleus sampling: probability mass kept." in page
    assert "No effect without --save." not in page.split("`--save`")[0]
    assert "**Not available yet:** `cuda`." in page


def test_what_differs_stands_between_the_marks():
    page = with_differences(f"above\n{BEGIN}\nyesterday's\n{END}\nbelow\n")
    assert page.startswith("above\n")
    assert page.endswith("\nbelow\n")
    assert "yesterday" not in page
    assert all(f"`{flag}`" in page for flag in (*CHANGED, *RENAMED, *GONE))
    assert with_differences(page) == page
    with pytest.raises(ValueError, match="must hold the marks"):
        with_differences("above")


def test_changed_flags_are_ours():
    assert set(CHANGED) <= set(flag_table())


def test_the_pages_are_those_that_the_code_makes():
    stale = [path.name for path, text in made_pages(ROOT).items() if path.read_text(encoding="utf-8") != text]
    assert not stale, f"python -m vime.config.docs makes these pages anew: {stale}"
