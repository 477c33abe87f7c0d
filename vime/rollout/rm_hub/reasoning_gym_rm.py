"""`--rm-type reasoning_gym`: the dataset's own verifier. Heavy to import: runs in a reward worker."""

from __future__ import annotations

from typing import Any

import reasoning_gym

from vime.errors import DataError
from vime.rollout.rm_hub.answers import extract_answer

__all__ = ["score"]


def score(response: str, label: Any, metadata: dict[str, Any]) -> float:
    """The score (0 to 1) that the dataset gives the extracted answer.

    metadata["reasoning_gym"] holds `dataset` (its name) and `entry` (the item as the dataset made it: question, answer,
    metadata); without `entry` the label is taken as the right answer.
    """
    task = metadata.get("reasoning_gym")
    if not isinstance(task, dict) or "dataset" not in task:
        raise DataError('reward \'reasoning_gym\' needs metadata {"reasoning_gym": {"dataset": name, "entry": {...}}} in the prompt file.')
    try:
        judge: Any = reasoning_gym.get_score_answer_fn(str(task["dataset"]))
    except ValueError as error:
        raise DataError(f"reward 'reasoning_gym': {error}. Is the dataset's name right, and reasoning-gym new enough?") from error
    entry = task.get("entry") or {"answer": str(label), "metadata": {}}
    return float(judge(extract_answer(response), entry))
