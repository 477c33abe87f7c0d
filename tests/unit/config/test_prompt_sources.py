"""How --prompt-data names its sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.config.prompt_sources import Source, joined, split_sources
from vime.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ("a.jsonl", [("a.jsonl", None)]),
        ("a.jsonl@[1:-2]", [("a.jsonl@[1:-2]", None)]),
        ("a.jsonl,b.parquet@[:5]", [("a.jsonl", None), ("b.parquet@[:5]", None)]),
        ("3*a.jsonl,0.5*b", [("a.jsonl", 3.0), ("b", 0.5)]),
    ],
)
def test_sources_are_taken_apart_and_joined_again(text: str, sources: list[tuple[str, float | None]]) -> None:
    split = split_sources(text)
    assert split == [Source(spec=spec, weight=weight) for spec, weight in sources]
    assert joined(split) == text


def test_a_file_that_is_there_may_have_a_comma_or_a_star_in_its_name(tmp_path: Path) -> None:
    for name in ("a,b.jsonl", "2*a.jsonl"):
        (tmp_path / name).write_text("{}")
        assert split_sources(str(tmp_path / name)) == [Source(spec=str(tmp_path / name))]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2*a.jsonl,b.jsonl", "'b.jsonl' has no weight and others have"),
        ("0*a.jsonl,1*b.jsonl", "names no source"),
        ("a.jsonl,,b.jsonl", "'' names no source"),
        ("a.jsonl@[x]", r"not of the form path@\[start:stop\]"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        split_sources(text)
