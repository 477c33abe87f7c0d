"""Finding the answer in a response."""

from __future__ import annotations

import re

__all__ = ["after_thinking", "extract_answer", "last_boxed", "strip_end_tokens"]

_END = re.compile(r"(?:\s*(?:<\|[^<>|\s]+\|>|</s>|<eos>|<pad>|<end_of_turn>|\[EOS\]))+\s*$", re.IGNORECASE)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def strip_end_tokens(text: str) -> str:
    """`text` without end-of-turn and padding tokens at its end (responses keep them unless --rollout-skip-special-tokens)."""
    return _END.sub("", text)


def after_thinking(text: str) -> str:
    """What follows the last </think>; all of it when there is none."""
    return text.rpartition("</think>")[2]


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} (braces balanced) or \fbox{...}; None when there is none that closes."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start)
    depth = 0
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin + 1 : position].strip()
    return None


def extract_answer(response: str) -> str:
    r"""The final answer: after the thinking, the last <answer>...</answer>, else the last \boxed{...}, else all the text."""
    text = after_thinking(strip_end_tokens(response))
    tagged = _TAG.findall(text)
    if tagged:
        return str(tagged[-1]).strip()
    boxed = last_boxed(text)
    return boxed if boxed is not None else text.strip()
