"""examples/fully_async: its configuration is valid, its task waits as it says, its simulation runs."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import pytest

from examples.fully_async.__main__ import flags
from examples.fully_async.simulate import steps_per_second
from examples.fully_async.task import LATENCIES, latency, share_of_digits, write_latencies
from examples.quickstart.make_assets import AssetSpec, make_assets
from tests.rules.source import ROOT
from vime.utils.arguments import parse_args
from vime.utils.types import Sample

pytestmark = pytest.mark.integration

SPEC = AssetSpec(hidden_size=64, num_layers=1, num_train=64, num_sft=1, num_heldout=1)


@pytest.mark.parametrize("staleness", [0, 2])
def test_both_command_lines_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int) -> None:
    make_assets(tmp_path / "assets", SPEC)
    monkeypatch.chdir(ROOT)
    config = parse_args(flags(tmp_path, 5, staleness))
    assert config.rollout.max_weight_staleness == staleness
    assert config.data.num_rollout == 5
    assert config.runs_ahead == bool(staleness)


def test_the_list_of_latencies_is_what_its_function_makes_and_has_a_long_tail(tmp_path: Path) -> None:
    write_latencies(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == LATENCIES.read_text()
    seconds = [latency(index) for index in range(512)]
    assert statistics.median(seconds) == pytest.approx(0.97, abs=0.01)
    assert statistics.fmean(seconds) == pytest.approx(1.51, abs=0.01)
    assert max(seconds) == 9.0
    assert latency(512) == latency(0)


def test_the_reward_is_the_share_of_digits() -> None:
    rewards = [asyncio.run(share_of_digits(None, Sample(response=text))) for text in ("12", " 1a\n", "ab", "")]
    assert rewards == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_simulation_runs(tmp_path: Path, staleness: int) -> None:
    paths = make_assets(tmp_path, SPEC)
    sizes = {"groups": 2, "samples": 2, "train": 0.1, "steps": 2, "faster": 1000.0}
    assert steps_per_second(paths["model"], paths["train"], staleness=staleness, **sizes) > 0
