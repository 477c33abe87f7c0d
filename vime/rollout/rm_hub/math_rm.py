"""`--rm-type math`: mathematical equality, judged by math-verify. Heavy: runs in a reward worker."""

from __future__ import annotations

from typing import Any

from math_verify import parse, verify

from vime.errors import DataError
from vime.rollout.rm_hub.answers import after_thinking, last_boxed, strip_end_tokens

__all__ = ["equal", "score"]


def score(response: str, label: Any, metadata: dict[str, Any]) -> float:
    r"""1.0 when the last \boxed{...} of the response (else the last expression in it) equals the label, else 0.0."""
    text = after_thinking(strip_end_tokens(response))
    boxed = last_boxed(text)
    return float(equal(text if boxed is None else f"\\boxed{{{boxed}}}", label))


def equal(answer: str, label: Any) -> bool:
    """Whether the mathematics found in `answer` equals the label's.

    Raises:
        DataError: the label holds no mathematics.
    """
    wanted = str(label).strip()
    inner = last_boxed(wanted)
    gold = parse(f"${wanted if inner is None else inner}$")
    if not gold:
        raise DataError(f"reward 'math': the label {wanted!r} holds no mathematical expression. Use --rm-type exact for plain text.")
    return bool(verify(gold, parse(answer)))
