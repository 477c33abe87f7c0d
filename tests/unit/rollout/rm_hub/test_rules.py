"""The rule rewards: what is right, what is wrong, and the shapes of answers that models give."""

from __future__ import annotations

from typing import Any

import pytest

from vime.errors import DataError
from vime.rollout.rm_hub import dapo, deepscaler, exact, f1, gpqa, math_rm, reasoning_gym_rm
from vime.rollout.rm_hub.answers import extract_answer, last_boxed, strip_end_tokens

CHOICES = {"choices": ["red", "green", "blue"]}
SUM = {"reasoning_gym": {"dataset": "chain_sum", "entry": {"question": "5 - 1 =", "answer": "4", "metadata": {}}}}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42<|im_end|>", "42"),
        ("42</s>\n", "42"),
        (" 42 <|im_end|><|endoftext|>", "42"),
        ("<think>it is 7</think>\n8<|im_end|>", "8"),
        ("so <answer>1</answer> no, <answer> 2 </answer>.", "2"),
        (r"\boxed{1} then \boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"<think>\boxed{9}</think> four", "four"),
        ("", ""),
    ],
)
def test_the_final_answer_is_found(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


def test_end_tokens_in_the_middle_stay() -> None:
    assert strip_end_tokens("a<|im_end|>b<eos>") == "a<|im_end|>b"


@pytest.mark.parametrize(("text", "content"), [("none", None), (r"\boxed{open", None), (r"\fbox{x}", "x"), (r"\boxed{{a}{b}}", "{a}{b}")])
def test_the_last_box_has_balanced_braces(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(("response", "label", "score"), [("7<|im_end|>", 7, 1.0), ("7.0", 7, 0.0), ("-3", "-3", 1.0), ("", "3", 0.0)])
def test_exact(response: str, label: Any, score: float) -> None:
    assert exact.score(response, label, {}) == score


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        (r"The answer is \boxed{\frac{1}{2}}.<|im_end|>", "0.5", 1.0),
        (r"\boxed{0.50}", r"\frac{1}{2}", 1.0),
        ("the result is 12", "12", 1.0),
        (r"\boxed{13}", "12", 0.0),
        (r"<think>\boxed{12}</think> \boxed{11}", "12", 0.0),
        (r"\boxed{x^2+2x+1}", r"(x+1)^2", 1.0),
        (r"\boxed{12}", r"\boxed{12}", 1.0),
        ("no idea", "12", 0.0),
        ("", "12", 0.0),
    ],
)
def test_math(response: str, label: str, score: float) -> None:
    assert math_rm.score(response, label, {}) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (r"<think>hm</think> \boxed{6}", 1.0),
        (r"###Response \boxed{6}", 1.0),
        (r"\boxed{6}", 0.0),
        (r"<think>\boxed{6}</think> six", 0.0),
        (r"<think></think>\boxed{7}", 0.0),
    ],
)
def test_deepscaler_asks_for_thinking_and_a_box(response: str, score: float) -> None:
    assert deepscaler.score(response, 6, {}) == score


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        ("Answer: 12", "12", True),
        ("Answer: 5\nno.\nAnswer: $12$<|im_end|>", "12", True),
        ("Answer: 12,000 dollars", "12000", True),
        (r"answer: \dfrac12", r"\frac{1}{2}", True),
        (r"Answer: x = \text{12}", "12", True),
        ("Answer: 13", "12", False),
        ("12", "12", False),
        ("Answer: 12" + " " * 300, "12", False),
    ],
)
def test_dapo(response: str, label: str, right: bool) -> None:
    result = dapo.score(response, label, {})
    assert result["acc"] is right
    assert result["score"] == (1.0 if right else -1.0)


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("The cat sat.", "cat sat", 1.0),
        ("cat", "the cat sat", 2 / 3),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("a", "the", 1.0),
        ("Paris", ["London", "paris"], 1.0),
    ],
)
def test_f1(response: str, label: Any, score: float) -> None:
    assert f1.score(response, label, {}) == pytest.approx(score)


@pytest.mark.parametrize(
    ("response", "label", "metadata", "score"),
    [
        ("The answer is (B).", "B", CHOICES, 1.0),
        ("Answer: C", "B", CHOICES, 0.0),
        (r"\boxed{B}", "green", CHOICES, 1.0),
        ("It must be green.", "B", CHOICES, 0.0),  # a sentence is no choice
        ("green", "B", CHOICES, 1.0),
        ("B", None, {**CHOICES, "correct_letter": "B"}, 1.0),
        ("<think>A? the answer is A</think> the answer is B", "B", CHOICES, 1.0),
        ("", "B", CHOICES, 0.0),
    ],
)
def test_gpqa(response: str, label: Any, metadata: dict[str, Any], score: float) -> None:
    assert gpqa.score(response, label, metadata) == score


@pytest.mark.parametrize(("response", "score"), [("4<|im_end|>", 1.0), ("<answer>+4.0</answer>", 1.0), ("5", 0.0)])
def test_reasoning_gym_uses_the_datasets_own_verifier(response: str, score: float) -> None:
    assert reasoning_gym_rm.score(response, None, SUM) == pytest.approx(score, abs=0.02)


def test_reasoning_gym_takes_the_label_when_there_is_no_entry() -> None:
    assert reasoning_gym_rm.score("4", 4, {"reasoning_gym": {"dataset": "chain_sum"}}) == 1.0


@pytest.mark.parametrize(("metadata", "said"), [({}, "needs metadata"), ({"reasoning_gym": {"dataset": "chain_sun"}}, "chain_sun")])
def test_reasoning_gym_names_what_the_row_lacks(metadata: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        reasoning_gym_rm.score("4", None, metadata)
