"""`Turns`: trainer and engines on the same GPUs, one after the other (--colocate).

engines asleep ── train ──▶ trainer gives back all but its weights, engines awake ── sync ──▶ trainer gives these back, too ── rollout
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vime.backends.weight_transfer.control import EngineControl, EngineEndpoint
from vime.config import RunConfig
from vime.ray.actor_group import RayTrainGroup
from vime.ray.engine_group import EngineGroup

__all__ = ["Turns"]

DISCARD = 2  # the level of vLLM's sleep at which weights are dropped: they are sent anew before the engines work again


class Turns:
    """Whose turn it is. Without --colocate, or where a side keeps its memory, nothing is done for it."""

    def __init__(self, config: RunConfig, group: RayTrainGroup, engines: EngineGroup | None) -> None:
        self._group, self._engines = group, engines
        self._trainer, self._rollout = config.offloads_train, config.offloads_rollout
        self._seconds = config.cluster.actor_deadline
        self._asleep = False

    def trainer(self) -> None:
        """The engines sleep, and forget their weights."""
        if self._rollout and not self._asleep:
            for endpoint in self._endpoints():
                EngineControl.of(endpoint).sleep(DISCARD, seconds=self._seconds)
            self._asleep = True

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Both are there, the trainer with its weights alone; afterwards it is the engines' turn."""
        if self._trainer:
            self._group.give_back(weights=False)
        self._wake()
        yield
        if self._trainer:
            self._group.give_back(weights=True)

    def _wake(self) -> None:
        if self._asleep:
            for endpoint in self._endpoints():
                EngineControl.of(endpoint).wake_up(seconds=self._seconds)
            self._asleep = False

    def _endpoints(self) -> list[EngineEndpoint]:
        return [] if self._engines is None else self._engines.receivers()
