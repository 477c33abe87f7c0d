"""Endless prompts: epochs, weights, what is left out, and going on exactly."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rollout.support import make_tokenizer
from vime.data import stream
from vime.data.prompts import PromptFormat
from vime.data.stream import PromptStreams
from vime.errors import DataError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One token a character."""
    return make_tokenizer(tmp_path_factory.mktemp("model"))


def write(path: Path, prompts: list[Any]) -> str:
    path.write_text("".join(json.dumps({"input": prompt}) + "\n" for prompt in prompts))
    return str(path)


def streams(spec: str, tokenizer: Any, *, seed: int | None = None, skip_bad: bool = False, **form: Any) -> PromptStreams:
    return PromptStreams(spec, PromptFormat(**form), tokenizer, shuffle_seed=seed, skip_bad=skip_bad)


def take(source: PromptStreams, count: int) -> list[Any]:
    return [source.next()[0].prompt for _ in range(count)]


def test_weighted_sources_keep_their_proportion_at_every_moment(tmp_path: Path, tokenizer: Any) -> None:
    a, b = write(tmp_path / "a.jsonl", ["a0", "a1"]), write(tmp_path / "b.jsonl", ["b0", "b1", "b2"])
    drawn = take(streams(f"3*{a},1*{b}", tokenizer), 40)
    for count in range(1, 41):
        assert abs(sum(prompt[0] == "a" for prompt in drawn[:count]) - 0.75 * count) <= 1
    assert [prompt for prompt in drawn if prompt[0] == "b"][:4] == ["b0", "b1", "b2", "b0"]


def test_sources_without_weights_are_one_after_the_other(tmp_path: Path, tokenizer: Any) -> None:
    a, b = write(tmp_path / "a.jsonl", ["a0", "a1"]), write(tmp_path / "b.jsonl", ["b0", "b1", "b2"])
    source = streams(f"{a},{b}@[1:]", tokenizer)
    assert len(source) == 4
    assert take(source, 6) == ["a0", "a1", "b1", "b2", "a0", "a1"]


def test_each_epoch_has_every_prompt_once_in_an_order_of_its_own(tmp_path: Path, tokenizer: Any) -> None:
    source = streams(write(tmp_path / "a.jsonl", [str(n) for n in range(20)]), tokenizer, seed=5)
    first, second = take(source, 20), take(source, 20)
    assert sorted(first) == sorted(second) == sorted(str(n) for n in range(20))
    assert first != second
    assert source.epoch == 1
    assert take(streams(str(tmp_path / "a.jsonl"), tokenizer, seed=5), 20) == first
    assert take(streams(str(tmp_path / "a.jsonl"), tokenizer, seed=6), 20) != first


@pytest.mark.parametrize("taken", [0, 3, 17])
def test_a_saved_place_goes_on_exactly(tmp_path: Path, tokenizer: Any, taken: int) -> None:
    a, b = write(tmp_path / "a.jsonl", ["a0", "a1", "longer than it may be"]), write(tmp_path / "b.jsonl", ["b0", "b1", "b2"])
    spec = f"2*{a},1*{b}"
    source = streams(spec, tokenizer, seed=1, max_prompt_len=5)
    take(source, taken)
    state = json.loads(json.dumps(source.state_dict()))
    again = streams(spec, tokenizer, seed=1, max_prompt_len=5)
    again.load_state_dict(state, path="state", prompt_data=spec)
    assert take(again, 20) == take(source, 20)


def test_a_state_of_other_prompts_templates_or_shuffles_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    spec = write(tmp_path / "a.jsonl", ["a0", "a1"])
    state = streams(spec, tokenizer, seed=1).state_dict()
    for other in (streams(spec, tokenizer, seed=2), streams(spec, tokenizer, seed=1, apply_chat_template=True)):
        with pytest.raises(DataError, match="state was saved with 2 prompts"):
            other.load_state_dict(state, path="state", prompt_data=spec)
    write(tmp_path / "a.jsonl", ["a0", "a2"])
    with pytest.raises(DataError, match="cannot go on exactly"):
        streams(spec, tokenizer, seed=1).load_state_dict(state, path="state", prompt_data=spec)


def test_long_prompts_are_passed_over_wherever_they_stand(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LOOK_AHEAD", 2)
    source = streams(write(tmp_path / "a.jsonl", ["ok0", "too long", "ok1", "also too long"]), tokenizer, max_prompt_len=5)
    assert (len(source), source.num_dropped) == (3, 1)  # what has not been looked at yet counts as there
    assert take(source, 5) == ["ok0", "ok1", "ok0", "ok1", "ok0"]
    assert (len(source), source.num_dropped) == (2, 2)


def test_a_malformed_row_ends_the_run_or_is_left_out_as_asked(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream, "LOOK_AHEAD", 1)
    spec = write(tmp_path / "a.jsonl", ["ok0", 7, "ok1"])
    source = streams(spec, tokenizer)
    assert take(source, 1) == ["ok0"]
    with pytest.raises(DataError, match=r"a\.jsonl:2: the prompt is neither text nor"):
        source.next()
    with caplog.at_level(logging.WARNING):
        source = streams(spec, tokenizer, skip_bad=True)
        assert Counter(take(source, 8)) == {"ok0": 4, "ok1": 4}
    assert (source.num_bad, len(source)) == (1, 2)
    assert "left out, 1 so far" in caplog.text
    assert "a.jsonl:2" in caplog.text


def test_when_nothing_is_left_the_run_does_not_start(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"all 2 prompts are longer than 3 tokens.*--rollout-max-prompt-len"):
        streams(write(tmp_path / "a.jsonl", ["longer", "than that"]), tokenizer, max_prompt_len=3)
    with pytest.raises(DataError, match="1 are malformed and 1 prompts are too long; none is left"):
        streams(write(tmp_path / "b.jsonl", ["longer", 7]), tokenizer, max_prompt_len=3, skip_bad=True)
    monkeypatch.setattr(stream, "LOOK_AHEAD", 1)
    source = streams(write(tmp_path / "c.jsonl", ["ok", "longer"]) + "@[0:2]", tokenizer, max_prompt_len=3)
    assert take(source, 2) == ["ok", "ok"]
