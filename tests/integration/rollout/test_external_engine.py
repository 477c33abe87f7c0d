"""A whole run with an engine that it did not start: it is sent weights and requests, and is left running."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.loop.whole_runs import Run, metrics
from vime.backends.vllm_utils.control_guard import SECRET_ENV
from vime.backends.vllm_utils.server import EngineServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture
def flags(engine: EngineServer, tiny_model: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"input": f"count to {n}: "}) + "\n" for n in range(8)))
    address = engine.endpoint.url.removeprefix("http://")
    words = f"--hf-checkpoint {tiny_model} --prompt-data {tmp_path}/prompts.jsonl --custom-rm-path varied.reward --rollout-batch-size 2 "
    words += "--n-samples-per-prompt 4 --num-rollout 2 --rollout-max-response-len 6 --rollout-max-context-len 512 --lr 1e-3 "
    words += "--advantage-estimator grpo --micro-batch-size 4"
    return [*words.split(), "--save", str(tmp_path / "run"), "--rollout-external-engine-addrs", address]


def test_an_engine_of_somebody_elses_is_trained_with_and_left_running(engine: EngineServer, flags: list[str], tmp_path: Path) -> None:
    run = Run(flags, tmp_path / "out.txt", env={SECRET_ENV: engine.endpoint.secret})
    assert run.wait(400) == 0, run.output[-3000:]
    assert [line["step"] for line in metrics(tmp_path / "run") if line["source"] == "step"] == [0, 1]
    run.assert_nothing_left()
    assert engine.poll() is None
    assert (engine.control.weight_version(), engine.control.is_paused()) == ("2", False)
    assert engine.control.prompt_log_probs([1, 2, 3])[1] == "2"


def test_a_run_without_the_engines_secret_says_so(flags: list[str], tmp_path: Path) -> None:
    run = Run(flags, tmp_path / "out.txt", env={SECRET_ENV: "another secret of enough characters"})
    assert run.wait(400) == 1, run.output[-3000:]
    assert "answered 403" in run.output
    assert SECRET_ENV in run.output
    run.assert_nothing_left()
