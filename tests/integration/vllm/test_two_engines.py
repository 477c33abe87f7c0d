"""Two engines behind one router, the second of them owned by a process that is killed in the end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.vllm.conftest import PROBE
from vime.backends.megatron_utils.update_weight.sync import WeightUpdater
from vime.backends.vllm_utils.router import RouterServer
from vime.backends.weight_transfer.control import EngineControl, EngineEndpoint
from vime.config.sections import WeightUpdateConfig
from vime.errors import EngineError
from vime.rollout.engine_client import EngineClient
from vime.utils.http_utils import HttpScope, RequestLimit

pytestmark = pytest.mark.integration

OWNER = """
import dataclasses, json, pathlib, sys
from tests.integration.conftest import START_SECONDS, engine_config
from vime.backends.vllm_utils.server import EngineServer
server = EngineServer(engine_config(pathlib.Path(sys.argv[1])), index=1, log_path=pathlib.Path(sys.argv[2]), run_id="tests")
print(json.dumps(dataclasses.asdict(server.wait_healthy(START_SECONDS))), flush=True)
sys.stdin.read()
"""


class Owner:
    """A process with an engine of its own."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.scratch = Path(tempfile.mkdtemp(dir="/tmp", prefix="vt"))  # a short path: engines keep sockets in there
        log = folder / "engine_1.log"
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(model), str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ, TMPDIR=str(self.scratch), PYTHONPATH=str(Path(__file__).parents[3])),
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, log.read_text()[-3000:]
        self.endpoint = EngineEndpoint(**json.loads(line))
        self.tree = psutil.Process(self.process.pid).children(recursive=True)
        self.segments = {path for process in self.tree for path in mapped_segments(process)}

    def kill(self) -> None:
        """kill -9 of the owner alone."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def mapped_segments(process: psutil.Process) -> set[Path]:
    """Shared memory that a process has mapped and that has a name."""
    text = Path(f"/proc/{process.pid}/maps").read_text()
    return {Path(path) for path in re.findall(r"(/dev/shm/\S+)$", text, re.MULTILINE)}


@pytest.fixture(scope="module")
def second(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    """Another engine on the same model, and its owner."""
    owner = Owner(tiny_model, tmp_path_factory.mktemp("second"))
    yield owner
    owner.kill()
    shutil.rmtree(owner.scratch, ignore_errors=True)


def test_both_engines_get_the_weights_and_the_requests(
    trainer: Any, second: Owner, router: RouterServer, next_version: Callable[[], int]
) -> None:
    endpoints = [trainer.engine.endpoint, second.endpoint]
    trainer.draw(11)
    version = next_version()
    updater = WeightUpdater(WeightUpdateConfig(), run_id="tests")
    assert len(second.tree) >= 4, [process.name() for process in second.tree]  # supervisor, API server, EngineCore, worker
    assert second.segments
    report = updater.update(endpoints, version, iter(trainer.buckets(5)), PROBE, trainer.log_probs)
    assert report.num_bytes == 2 * sum(tensor.nbytes for bucket in trainer.buckets(100) for _, tensor in bucket)

    router.add_worker(second.endpoint.url)
    engines = [EngineControl.of(endpoint) for endpoint in endpoints]
    before = [engine.metric("vllm:request_success_total") for engine in engines]
    client = EngineControl(router.url, "none")
    versions: Counter[str] = Counter()
    for seed in range(8):
        params = {"max_tokens": 3, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "seed": seed}
        choice = client.call("POST", "/inference/v1/generate", {"token_ids": [9, 8, 7], "sampling_params": params})["choices"][0]
        versions.update(span["version"] for span in choice["weight_versions"])
    router.remove_worker(second.endpoint.url)
    served = [engine.metric("vllm:request_success_total") - earlier for engine, earlier in zip(engines, before, strict=True)]
    assert versions == {str(version): 8}
    assert served == [4, 4]


def test_power_of_two_is_the_policy_with_two_engines(trainer: Any, second: Owner, tmp_path: Path) -> None:
    urls = [trainer.engine.endpoint.url, second.endpoint.url]
    router = RouterServer(urls, log_path=tmp_path / "r.log", router_tokens=["--policy", "power_of_two"])
    try:
        router.wait_ready(60.0)
        EngineControl(router.url, "none").prompt_log_probs([1, 2, 3])
        assert router.policy() == "power_of_two"
    finally:
        router.stop()


def test_a_session_stays_on_one_engine_with_consistent_hash(trainer: Any, second: Owner, tmp_path: Path) -> None:
    engines = [EngineControl.of(endpoint) for endpoint in (trainer.engine.endpoint, second.endpoint)]
    router = RouterServer([engine.url for engine in engines], log_path=tmp_path / "r.log", router_tokens=["--policy", "consistent_hash"])

    def served_by(session: str) -> tuple[float, ...]:
        """How many of four requests of a session each engine answered."""
        before = [engine.metric("vllm:request_success_total") for engine in engines]
        asyncio.run(ask(session))
        return tuple(engine.metric("vllm:request_success_total") - earlier for engine, earlier in zip(engines, before, strict=True))

    async def ask(session: str) -> None:
        scope = HttpScope(base_url=router.url, limit=RequestLimit(4))
        for _ in range(4):
            await EngineClient(scope).generate([9, 8, 7], {"max_new_tokens": 2, "temperature": 1.0}, session_id=session)
        await scope.close()

    try:
        router.wait_ready(60.0)
        found = {served_by(f"session {number}") for number in range(12)}
    finally:
        router.stop()
    assert found == {(4.0, 0.0), (0.0, 4.0)}


def test_an_engine_that_dies_in_a_transfer_is_left_behind_and_the_other_serves_the_new_version(
    trainer: Any, second: Owner, next_version: Callable[[], int]
) -> None:
    server = next(process for process in second.tree if process.cmdline()[1:3] == ["-m", "vllm.entrypoints.openai.api_server"])

    def buckets() -> Iterator[Any]:
        for number, bucket in enumerate(trainer.buckets(5)):
            if number == 2:
                server.kill()
                server.wait(30)
            yield bucket

    trainer.draw(12)
    version = next_version()
    updater = WeightUpdater(WeightUpdateConfig(), run_id="tests", step_seconds=60.0)
    report = updater.update([trainer.engine.endpoint, second.endpoint], version, buckets(), PROBE, trainer.log_probs)
    assert list(report.lost) == [second.endpoint.url]
    assert "cannot be reached" in report.lost[second.endpoint.url]
    assert report.proof_max_abs_diff < 1e-4
    control = trainer.engine.control
    assert (control.weight_version(), control.is_paused()) == (str(version), False)


def test_killing_an_engines_owner_leaves_nothing_and_the_next_sync_names_the_engine(
    trainer: Any, second: Owner, next_version: Callable[[], int]
) -> None:
    second.kill()  # its API server is dead already
    _, alive = psutil.wait_procs(second.tree, timeout=20)
    assert alive == []
    assert [path for path in second.segments if path.exists()] == []
    assert [path.name for path in second.scratch.iterdir() if not path.name.startswith("torchinductor")] == []

    updater = WeightUpdater(WeightUpdateConfig(), run_id="tests")
    with pytest.raises(EngineError, match=r"engine 1 at .* cannot be reached.*engine 0, engine 1 stay paused"):
        updater.update([trainer.engine.endpoint, second.endpoint], next_version(), iter(trainer.buckets(5)), PROBE, trainer.log_probs)
    assert trainer.engine.control.is_paused()
