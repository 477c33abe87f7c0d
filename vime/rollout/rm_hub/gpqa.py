"""`--rm-type gpqa`: multiple choice."""

from __future__ import annotations

import re
import string
from typing import Any

from vime.rollout.rm_hub.answers import after_thinking, last_boxed, strip_end_tokens

__all__ = ["score"]

_STATED = re.compile(r"(?:answer|option|choice)\s*(?:is|:|=)?\s*\**\s*\(?([A-Z])\)?(?![A-Za-z])", re.IGNORECASE)
_ALONE = re.compile(r"(?<![A-Za-z])\(?([A-Z])\)?(?![A-Za-z])")


def score(response: str, label: Any, metadata: dict[str, Any]) -> float:
    """1.0 when the chosen letter, or the chosen option's text, is the right one.

    The right letter is `label` (or metadata["correct_letter"]) when that is a letter, else the option in
    metadata["choices"] (a list, or a dict by letter) whose text the label is.
    """
    options = _options(metadata.get("choices"))
    right = _right_letter(label if label is not None else metadata.get("correct_letter"), options)
    text = after_thinking(strip_end_tokens(response)).strip()
    letters = set(options) or set(string.ascii_uppercase[:10])
    chosen = _chosen(text, letters)
    if chosen is not None:
        return float(chosen == right)
    wanted = options.get(right, "")
    said = [letter for letter, option in options.items() if _same(last_boxed(text) or text, option)]
    return float(bool(wanted) and said == [right])


def _options(choices: Any) -> dict[str, str]:
    if isinstance(choices, dict):
        return {str(letter).upper(): str(text) for letter, text in choices.items()}
    return dict(zip(string.ascii_uppercase, map(str, choices or []), strict=False))


def _right_letter(label: Any, options: dict[str, str]) -> str:
    text = str(label).strip()
    if len(text.strip("()")) == 1:
        return text.strip("()").upper()
    return next((letter for letter, option in options.items() if _same(text, option)), text)


def _chosen(text: str, letters: set[str]) -> str | None:
    boxed = last_boxed(text)
    if boxed is not None and boxed.strip("()").upper() in letters:
        return boxed.strip("()").upper()
    for pattern in (_STATED, _ALONE):
        found = [letter.upper() for letter in pattern.findall(text) if letter.upper() in letters]
        if found:
            return found[-1]
    return None


def _same(one: str, other: str) -> bool:
    return " ".join(one.lower().split()).strip(" .") == " ".join(other.lower().split()).strip(" .")
