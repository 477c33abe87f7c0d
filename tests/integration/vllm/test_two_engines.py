"""Two engines behind one router: one sync for both, requests on both, and what a dead one does to a sync."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import START_SECONDS, engine_config
from tests.integration.vllm.conftest import PROBE
from vime.backends.megatron_utils.update_weight.sync import WeightUpdater
from vime.backends.vllm_utils.router import RouterServer
from vime.backends.vllm_utils.server import EngineServer
from vime.backends.weight_transfer.control import EngineControl
from vime.config.sections import WeightUpdateConfig
from vime.errors import EngineError

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def second(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """Another engine on the same model."""
    log = tmp_path_factory.mktemp("second") / "engine_1.log"
    server = EngineServer(engine_config(tiny_model), index=1, log_path=log, run_id="tests")
    try:
        server.wait_healthy(START_SECONDS)
        yield server
    finally:
        server.stop()


def finished_requests(control: EngineControl) -> int:
    """Requests that the engine has completed since it started."""
    _, text = control._once("GET", "/metrics", None, 5.0)
    lines = [line for line in text.decode().splitlines() if line.startswith("vllm:request_success_total")]
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


def test_both_engines_get_the_weights_and_the_requests(
    trainer: Any, second: EngineServer, router: RouterServer, next_version: Callable[[], int]
) -> None:
    engines = [trainer.engine, second]
    trainer.draw(11)
    version = next_version()
    updater = WeightUpdater([server.endpoint for server in engines], WeightUpdateConfig(), run_id="tests")
    report = updater.update(version, iter(trainer.buckets(5)), PROBE, trainer.log_probs)
    assert report.num_bytes == 2 * sum(tensor.nbytes for bucket in trainer.buckets(100) for _, tensor in bucket)

    router.add_worker(second.endpoint.url)
    before = [finished_requests(server.control) for server in engines]
    params = {"max_tokens": 3, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    client = EngineControl(router.url, "none")
    versions: Counter[str] = Counter()
    for seed in range(8):
        body = {"token_ids": [9, 8, 7], "sampling_params": params | {"seed": seed}}
        choice = client.call("POST", "/inference/v1/generate", body)["choices"][0]
        versions.update(span["version"] for span in choice["weight_versions"])
    router.remove_worker(second.endpoint.url)
    served = [finished_requests(server.control) - earlier for server, earlier in zip(engines, before, strict=True)]
    assert versions == {str(version): 8}
    assert served == [4, 4]


def test_a_sync_with_a_dead_engine_names_it_and_resumes_none(trainer: Any, second: EngineServer, next_version: Callable[[], int]) -> None:
    second.stop()
    updater = WeightUpdater([trainer.engine.endpoint, second.endpoint], WeightUpdateConfig(), run_id="tests")
    with pytest.raises(EngineError, match=r"engine 1 at .* cannot be reached.*engine 0, engine 1 stay paused"):
        updater.update(next_version(), iter(trainer.buckets(5)), PROBE, trainer.log_probs)
    assert trainer.engine.control.is_paused()
