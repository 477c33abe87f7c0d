"""What is made of a teacher's reply."""

from __future__ import annotations

from typing import Any

import pytest

from vime.errors import EngineError, GenerationError
from vime.rollout.teacher import parse_prompt_log_probs

TOKENS = [5, 9, 2]


def reply(*values: float) -> dict[str, Any]:
    """One entry a token; the second has the likeliest token besides."""
    entries: list[Any] = [None] + [{str(token): {"logprob": value, "rank": 7}} for token, value in zip(TOKENS[1:], values, strict=True)]
    entries[1]["77"] = {"logprob": -0.01, "rank": 1}
    return {"choices": [{"prompt_logprobs": entries}]}


def test_each_token_gets_its_own_log_probability() -> None:
    assert parse_prompt_log_probs(reply(-1.5, -2.0), TOKENS, "url") == [0.0, -1.5, -2.0]


@pytest.mark.parametrize(
    "torn",
    [{}, {"choices": []}, {"choices": [{"prompt_logprobs": None}]}, {"choices": [{"prompt_logprobs": [None, {"9": {"logprob": -1}}]}]}],
)
def test_a_reply_without_them_is_refused(torn: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="a vLLM server of a model with the student's tokenizer"):
        parse_prompt_log_probs(torn, TOKENS, "url")


def test_a_token_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(EngineError, match="KeyError"):
        parse_prompt_log_probs(reply(-1.5, -2.0), [5, 8, 2], "url")


def test_a_number_that_is_none_is_no_log_probability() -> None:
    with pytest.raises(GenerationError, match="no log-probability"):
        parse_prompt_log_probs(reply(-1.5, float("-inf")), TOKENS, "url")
