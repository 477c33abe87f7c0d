"""`--rm-type f1`: overlap of words with the label."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from vime.rollout.rm_hub.answers import after_thinking, strip_end_tokens

__all__ = ["score"]

_DROPPED = str.maketrans("", "", string.punctuation)


def score(response: str, label: Any, metadata: dict[str, Any]) -> float:
    """Token F1 after lower-casing and dropping punctuation and articles (SQuAD, arXiv 1606.05250, section 6.1).

    F1 = 2PR / (P + R) with P and R the shares of the response's and the label's words that are common; a list of labels
    counts with the best of them.
    """
    words = _words(after_thinking(strip_end_tokens(response)))
    labels = label if isinstance(label, list) else [label]
    return max(_f1(words, _words(str(one))) for one in labels)


def _words(text: str) -> list[str]:
    bare = text.lower().translate(_DROPPED)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _f1(found: list[str], wanted: list[str]) -> float:
    common = sum((Counter(found) & Counter(wanted)).values())
    if not found or not wanted:
        return float(found == wanted)
    return 2 * common / (len(found) + len(wanted))
