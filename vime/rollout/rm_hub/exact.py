"""`--rm-type exact`: the answer equals the label, as text."""

from __future__ import annotations

from typing import Any

from vime.rollout.rm_hub.answers import extract_answer

__all__ = ["score"]


def score(response: str, label: Any, metadata: dict[str, Any]) -> float:
    """1.0 when the extracted answer is the label's text (white space at the ends apart), else 0.0."""
    return float(extract_answer(response) == str(label).strip())
