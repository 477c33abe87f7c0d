"""`--rm-type dapo`: "Answer: ..." in the last 300 characters, compared after normalisation."""

from __future__ import annotations

import re
from typing import Any

from vime.rollout.rm_hub.answers import last_boxed, strip_end_tokens

__all__ = ["normalize", "score"]

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_UNITS = re.compile(
    r"\b(?:square|ways|integers|dollars|mph|inches|ft|hours|km|units|points|feet|minutes|digits|cents|degrees|cm|gm|pounds|meters|meals|edges"
    r"|students|children|multiples)\b"
)
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mbox|overline|boxed)\{([^{}]*)\}")


def score(response: str, label: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """{"score": 1.0 or -1.0, "acc": bool, "pred": str}; use --reward-key score.

    The rule of DAPO (arXiv 2503.14476, equation 7: +1 when the final answer is equivalent, else -1) with the "Answer:"
    line and the normalisation of Minerva (arXiv 2206.14858, appendix D.1).
    """
    found = _ANSWER.findall(strip_end_tokens(response)[-300:])
    pred = normalize(found[-1]) if found else "[INVALID]"
    wanted = str(label)
    right = bool(found) and pred == normalize(last_boxed(wanted) or wanted)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def normalize(answer: str) -> str:
    """A final answer without units, wrappers and spacing: '$\\text{12,000}$ dollars' -> '12000'."""
    text = answer.split("=")[-1]
    while (bare := _WRAPPED.sub(r"\1", text)) != text:
        text = bare
    text = _UNITS.sub("", text)
    text = re.sub(r"\\(?:left|right|[,;:!]|quad|%|\$)|[$%°*]|\^\\circ|\^\{\\circ\}", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\d)", r"\\sqrt{\1}", text)
    text = "".join(text.split()).rstrip(".")
    if text.replace(",", "").lstrip("+-").isdigit():
        return text.replace(",", "")
    return text
