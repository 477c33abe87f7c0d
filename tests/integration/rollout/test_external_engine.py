"""A whole run with an engine that it did not start: it is sent weights and requests, and is left running."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.loop.whole_runs import Run, metrics
from vime.backends.vllm_utils.control_guard import SECRET_ENV
from vime.backends.vllm_utils.server import EngineServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture
def flags(engine: EngineServer, tiny_model: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"input": f"count to {n}: "}) + "\n" for n in range(8)))
    # The learning rate moves no weight's last place: other tests compare this engine with the model.
    address = engine.endpoint.url.removeprefix("http://")
    words = f"--hf-checkpoint {tiny_model} --prompt-data {tmp_path}/prompts.jsonl --custom-rm-path varied.reward --rollout-batch-size 2 "
    words += "--n-samples-per-prompt 4 --num-rollout 2 --rollout-max-response-len 6 --rollout-max-context-len 512 --lr 1e-10 "
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


WITHOUT = """
import sys
from pathlib import Path
from tests.integration.conftest import engine_config
from vime.backends.weight_transfer.control import EngineEndpoint
from vime.errors import EngineError
from vime.ray.engine_actor import ExternalEngine

endpoint = EngineEndpoint(name="engine 0", url=sys.argv[2], secret="another secret of enough characters")
engine = ExternalEngine(engine_config(Path(sys.argv[1])), endpoint, sys.argv[3] + "/engine.log")
try:
    engine.start()
except EngineError as error:
    Path(sys.argv[3], "said").write_text(str(error))
"""


def test_without_the_engines_secret_its_start_names_the_variable(engine: EngineServer, tiny_model: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", WITHOUT, str(tiny_model), engine.endpoint.url, str(tmp_path)], check=True, timeout=200)
    said = (tmp_path / "said").read_text()
    assert "answered 403" in said
    assert said.endswith(f"Give this run the {SECRET_ENV} that the engine was started with.")
