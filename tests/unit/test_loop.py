"""The loop's order of phases, on parts that only write down what is asked of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vime.cli.record import RunRecord
from vime.config import RunConfig
from vime.config import sections as s
from vime.loop import run_loop


class Parts:
    """Rollout side, trainer and record in one."""

    has_engines = True

    def __init__(self, syncs: set[int]) -> None:
        self.calls: list[str] = []
        self.syncs = syncs

    def __getattr__(self, name: str) -> Any:
        def call(*values: Any) -> Any:
            shown = [str(value) for value in values if isinstance(value, int)]
            if name != "phase":
                self.calls.append(" ".join([name, *shown]))
            return {"eval_due": False, "commit_due": False, "endpoints": [], "train": {}}.get(name)

        return call

    def generate(self, step: int) -> Any:
        self.calls.append(f"generate {step}")
        return SimpleNamespace(metrics={}, samples=[], refs=[])

    def sync_due(self, steps_done: int) -> bool:
        return steps_done in self.syncs

    def shown(self) -> list[str]:
        """The calls that matter here."""
        names = ("begin", "generate", "before_sync", "update_weights", "weights_sent", "train")
        return [call for call in self.calls if call.split()[0] in names]


def test_weights_are_sent_between_what_holds_generation_and_what_lets_it_go_on() -> None:
    parts = Parts(syncs={1, 2})
    run_loop(0, 2, parts, parts, parts)
    sync = ["before_sync", "update_weights {}", "weights_sent {}"]
    expected = ["begin 0 2"]
    for version in range(3):
        expected += [call.format(version) for call in sync]
        if version < 2:
            expected += [f"generate {version}", "train"]
    assert parts.shown() == expected


def test_no_weights_are_sent_where_no_sync_is_due() -> None:
    parts = Parts(syncs={2})
    run_loop(0, 2, parts, parts, parts)
    assert [call for call in parts.shown() if call.startswith("weights_sent")] == ["weights_sent 0", "weights_sent 2"]


@pytest.mark.parametrize(
    ("interval", "save_interval", "eval_interval", "due"),
    [(1, None, None, [1, 2, 3, 4, 5]), (2, None, None, [2, 4, 5]), (3, 2, None, [2, 3, 4, 5]), (4, None, 3, [3, 4, 5])],
)
def test_weights_are_sent_every_n_steps_and_where_somebody_looks_at_them(
    tmp_path: Path, interval: int, save_interval: int | None, eval_interval: int | None, due: list[int]
) -> None:
    config = RunConfig(
        weight_update=s.WeightUpdateConfig(update_weights_interval=interval),
        checkpoint=s.CheckpointConfig(save=str(tmp_path) if save_interval else None, save_interval=save_interval),
        eval=s.EvalConfig(eval_prompt_data=["held", "held.jsonl"] if eval_interval else [], eval_interval=eval_interval),
    )
    record = RunRecord(config, tmp_path, first_step=0, num_steps=5)
    assert [steps for steps in range(1, 6) if record.sync_due(steps)] == due
    record.close()
