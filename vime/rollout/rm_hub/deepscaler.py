"""`--rm-type deepscaler`: a boxed answer after the thinking. Heavy: runs in a reward worker."""

from __future__ import annotations

from typing import Any

from vime.rollout.rm_hub.answers import last_boxed, strip_end_tokens
from vime.rollout.rm_hub.math_rm import equal

__all__ = ["score"]


def score(response: str, label: Any, metadata: dict[str, Any]) -> float:
    r"""1.0 when the last \boxed{...} after </think> (or ###Response) equals the label.

    A response that never ends its thinking scores 0.0, and so does one without a box: the format is part of the task.
    """
    text = strip_end_tokens(response)
    for marker in ("</think>", "###Response"):
        if marker in text:
            boxed = last_boxed(text.rpartition(marker)[2])
            break
    else:
        return 0.0
    if boxed is None:
        return 0.0
    return float(boxed == str(label).strip() or equal(f"\\boxed{{{boxed}}}", label))
