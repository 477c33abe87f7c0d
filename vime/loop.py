"""The loop: the only place that orders phases.

    rollout.generate ──▶ train.train ──▶ train.update_weights ──▶ rollout.evaluate ──▶ commit (every --save-interval)

Cast: `rollout` (RolloutClient: prompts, engines, rewards), `train` (RayTrainGroup: Megatron), `record` (RunRecord: metrics,
status, commits). Weight version v is what step v trains from: version 0 are the start weights, step 0 yields version 1.
With --max-weight-staleness 0 `generate` makes a step's batch, and the two sides take turns. With more the rollout side generates all
the time, and `generate` only takes the batch: what is trained at step s was begun under version s - bound or later. Either side may
be absent: no engines with --debug-train-only, no trainer with --debug-rollout-only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from vime.types import WeightSyncReport

__all__ = ["Record", "Rollout", "Trainer", "run_loop"]


class Rollout(Protocol):
    """What the loop needs of the rollout side."""

    @property
    def has_engines(self) -> bool: ...

    def generate(self, rollout_id: int) -> Any: ...
    def evaluate(self, rollout_id: int) -> tuple[dict[str, float], list[dict[str, Any]]]: ...
    def save(self, path: str, step: int) -> None: ...
    def endpoints(self) -> list[Any]: ...
    def begin(self, first_step: int, num_steps: int) -> None: ...
    def before_sync(self) -> None: ...
    def weights_sent(self, version: int) -> None: ...


class Trainer(Protocol):
    """What the loop needs of the trainer."""

    def train(self, batch_refs: list[Any]) -> dict[str, float]: ...
    def update_weights(self, version: int, engines: list[Any]) -> WeightSyncReport: ...


class Record(Protocol):
    """Metrics, status and commits of the run."""

    def phase(self, step: int | None, text: str) -> None: ...
    def finish_step(self, step: int, metrics: dict[str, float], phases: dict[str, float], samples: list[dict[str, Any]]) -> None: ...
    def finish_eval(self, steps_done: int, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None: ...
    def finish_sync(self, version: int, report: WeightSyncReport) -> None: ...
    def commit_due(self, step: int) -> bool: ...
    def eval_due(self, steps_done: int) -> bool: ...
    def sync_due(self, steps_done: int) -> bool: ...
    def commit(self, step: int, train: Any, rollout: Any) -> None: ...


def run_loop(first_step: int, num_steps: int, rollout: Rollout, train: Trainer | None, record: Record) -> None:
    """Run steps first_step … num_steps - 1. Every exception leaves through here; the caller cleans up."""

    def sync(version: int) -> None:
        if train is not None and rollout.has_engines:
            record.phase(None, f"sending weights, version {version}")
            rollout.before_sync()
            record.finish_sync(version, train.update_weights(version, rollout.endpoints()))
            rollout.weights_sent(version)

    def evaluate(steps_done: int) -> None:
        if record.eval_due(steps_done):
            record.phase(None, "evaluating")
            record.finish_eval(steps_done, *rollout.evaluate(steps_done))

    rollout.begin(first_step, num_steps)
    sync(first_step)
    evaluate(first_step)
    for step in range(first_step, num_steps):
        phases: dict[str, float] = {}
        with _timed(phases, "rollout"):
            record.phase(step, "rollout")
            batch = rollout.generate(step)
        metrics = dict(batch.metrics)
        if train is not None:
            with _timed(phases, "train"):
                record.phase(step, "training")
                metrics |= train.train(batch.refs)
        with _timed(phases, "sync"):
            if record.sync_due(step + 1):
                sync(step + 1)
        record.finish_step(step, metrics, phases, batch.samples)
        evaluate(step + 1)
        if record.commit_due(step):  # last: a committed step's metrics and evaluation are on disk
            record.phase(step, "saving")
            record.commit(step, train, rollout)


@contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    begun = time.perf_counter()
    try:
        yield
    finally:
        phases[name] = time.perf_counter() - begun
