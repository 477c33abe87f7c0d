"""What a whole run of rollouts shares: the tokenizer, and the processes that check answers.

Held by the data source (which lives as long as the run) and handed to each rollout; nothing here is global.
"""

from __future__ import annotations

from typing import Any

from vime.data.tokenizer import load_tokenizer
from vime.rollout.rm_hub.workers import RewardWorkers

__all__ = ["RolloutResources"]


class RolloutResources:
    """Made once per run; parts are started when first used."""

    def __init__(self, hf_checkpoint: str | None) -> None:
        self._path = hf_checkpoint
        self._tokenizer: Any = None
        self.reward_workers = RewardWorkers()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._path)
        return self._tokenizer

    def close(self) -> None:
        """End the worker processes. Also happens by itself when this process ends, however it ends."""
        self.reward_workers.close()
