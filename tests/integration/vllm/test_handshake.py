"""The handshake with a real engine and a real router: they agree with a right configuration, and each wrong one is named."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import engine_config, make_tiny_model
from tests.integration.vllm.tampering_proxy import Proxy, tampering_proxy
from tests.rules.source import ROOT
from vime.backends.vllm_utils import handshake
from vime.backends.vllm_utils.process import PortClaim
from vime.backends.vllm_utils.router import RouterClient, RouterServer
from vime.backends.vllm_utils.server import EngineServer
from vime.backends.weight_transfer.control import EngineControl
from vime.config import RunConfig
from vime.config import sections as s
from vime.errors import DeadlineError, EngineError

pytestmark = pytest.mark.integration

# The manager sends its process's output to a log, so it lives in a process of its own; nothing of Ray is started.
MANAGER = """
import json, pickle, sys
from pathlib import Path
from vime.backends.vllm_utils import handshake
from vime.backends.vllm_utils.router import RouterClient
from vime.ray.rollout import RolloutManager

folder, intruder, handshake.FRESH_WEIGHTS = Path(sys.argv[1]), *sys.argv[2:]
config, endpoint = pickle.loads((folder / "made_by_the_test").read_bytes())
manager = RolloutManager(config, str(folder), str(folder))
found = []
try:
    manager.connect(config.models[0], [endpoint])
    RouterClient(*manager._routers.addresses()[config.models[0].name]).add_worker(intruder)
    for call in (manager.generate, manager.evaluate):
        try:
            call(0)
        except Exception as error:
            found.append([type(error).__name__, str(error)])
finally:
    manager.stop()
(folder / "found.json").write_text(json.dumps(found))
"""


@pytest.fixture(autouse=True)
def version_so_far(engine: EngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared engine has been sent weights by other tests: its version is what this run begins with."""
    monkeypatch.setattr(handshake, "FRESH_WEIGHTS", engine.control.weight_version())


@pytest.fixture
def proxy(engine: EngineServer) -> Iterator[Proxy]:
    with tampering_proxy(engine.endpoint) as made:
        yield made


@pytest.fixture
def config(tiny_model: Path) -> RunConfig:
    return engine_config(tiny_model)


def refusal(config: RunConfig, engine: EngineServer, router: RouterClient) -> str:
    with pytest.raises(EngineError) as caught:
        handshake.shake_hands(config, [engine.endpoint], router)
    return str(caught.value)


def test_a_right_configuration_agrees(config: RunConfig, engine: EngineServer, router: RouterServer, tiny_model: Path) -> None:
    (facts,) = handshake.shake_hands(config, [engine.endpoint], router)
    assert (facts.model, facts.dtype, facts.max_model_len, facts.vocab_size) == (str(tiny_model), "float32", 512, 128)
    assert (facts.world_size, facts.transport, facts.max_requests) == (1, "shm", None)
    assert router.policy() == "round_robin"


def test_another_length_is_named(config: RunConfig, engine: EngineServer, router: RouterServer) -> None:
    text = refusal(dataclasses.replace(config, rollout=s.RolloutConfig(rollout_max_context_len=256)), engine, router)
    assert "max model len is 512, --rollout-max-context-len is 256" in text


def test_another_model_is_named(engine: EngineServer, router: RouterServer, tmp_path: Path, tiny_model: Path) -> None:
    other = make_tiny_model(tmp_path / "other")
    text = refusal(engine_config(other), engine, router)
    assert f"model is '{tiny_model}', --hf-checkpoint is '{other}'" in text


def test_all_disagreements_are_reported_at_once(config: RunConfig, engine: EngineServer, router: RouterServer) -> None:
    wrong = dataclasses.replace(
        config,
        vllm_tokens=("--dtype", "bfloat16"),
        cluster=s.ClusterConfig(rollout_num_gpus=4, rollout_num_gpus_per_engine=2),
        router_tokens=("--max-concurrent-requests", "8", "--queue-size=2"),
    )
    text = refusal(wrong, engine, router)
    assert "dtype is 'float32', --vllm-dtype is 'bfloat16'" in text
    assert "tensor parallel size is 1, --rollout-num-gpus-per-engine is 2" in text
    assert "1 engines came up" in text
    assert "refuses more than 8 requests and 2 waiting ones" in text
    assert "have up to 512 in flight" in text


def test_another_policy_is_named(config: RunConfig, engine: EngineServer, router: RouterServer) -> None:
    text = refusal(dataclasses.replace(config, router_tokens=("--policy", "random")), engine, router)
    assert "chooses engines by round_robin, --router-policy asks for random" in text


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/update_weights", "/collective_rpc"])
def test_an_absent_endpoint_is_named_with_its_cure(config: RunConfig, proxy: Proxy, path: str) -> None:
    proxy.absent.add(path)
    with pytest.raises(EngineError) as caught:
        handshake.greet_engine(config, EngineControl.of(proxy.endpoint))
    assert f"engine 1 at {proxy.url} lacks {path} ({handshake.NEEDED[path]})." == str(caught.value)


@pytest.mark.parametrize(("field", "words"), [("weight_versions", "weight versions"), ("logprobs", "log-probs")])
def test_a_reply_without_what_training_needs_is_named(
    config: RunConfig, proxy: Proxy, router: RouterServer, field: str, words: str
) -> None:
    def poorer(answer: dict[str, Any]) -> dict[str, Any]:
        return answer | {"choices": [choice | {field: None} for choice in answer["choices"]]}

    proxy.altered["/inference/v1/generate"] = poorer
    with pytest.raises(EngineError, match=rf"engine 1 at {proxy.url}: its replies carry no {words}, which training needs"):
        handshake.shake_hands(config, [proxy.endpoint], router)


def test_engines_that_differ_are_both_named(config: RunConfig, engine: EngineServer, proxy: Proxy, router: RouterServer) -> None:
    two = dataclasses.replace(config, cluster=s.ClusterConfig(rollout_num_gpus=2))

    def older(answer: dict[str, Any]) -> dict[str, Any]:
        return answer | {"version": "0.26.0"}

    proxy.altered["/version"] = older
    router.add_worker(proxy.url)
    try:
        with pytest.raises(
            EngineError, match=rf"vLLM of engine 1 at {proxy.url} is '0\.26\.0', that of engine 0 at {engine.endpoint.url} is"
        ):
            handshake.shake_hands(two, [engine.endpoint, proxy.endpoint], router)
    finally:
        router.remove_worker(proxy.url)


def test_a_worker_that_is_no_engine_of_the_run_is_named(
    config: RunConfig, engine: EngineServer, proxy: Proxy, router: RouterServer
) -> None:
    router.add_worker(proxy.url)
    try:
        assert f"also sends requests to {proxy.url}, which is no engine of this run" in refusal(config, engine, router)
        with pytest.raises(EngineError, match="also sends requests to"):
            handshake.check_workers([engine.endpoint.url], router)
    finally:
        router.remove_worker(proxy.url)
    handshake.check_workers([engine.endpoint.url], router)


def test_a_worker_that_comes_during_the_run_ends_it(config: RunConfig, engine: EngineServer, proxy: Proxy, tmp_path: Path) -> None:
    (tmp_path / "made_by_the_test").write_bytes(pickle.dumps((config, engine.endpoint)))
    command = [sys.executable, "-c", MANAGER, str(tmp_path), proxy.url, engine.control.weight_version()]
    subprocess.run(command, check=True, timeout=240, cwd=ROOT)
    found = json.loads((tmp_path / "found.json").read_text())
    assert [name for name, _ in found] == ["EngineError", "EngineError"]
    assert all(f"also sends requests to {proxy.url}" in text for _, text in found)


def test_an_engine_that_the_router_does_not_know_is_named(config: RunConfig, engine: EngineServer, router: RouterServer) -> None:
    router.remove_worker(engine.endpoint.url)
    try:
        assert f"does not know {engine.endpoint.url}" in refusal(config, engine, router)
    finally:
        router.add_worker(engine.endpoint.url)


def test_an_engine_that_another_run_controls_is_named(
    config: RunConfig, engine: EngineServer, router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "FRESH_WEIGHTS", "none of them")
    engine.control.pause()
    try:
        with pytest.raises(EngineError, match=r"weight version is .* expects 'none of them'") as caught:
            handshake.greet_engine(config, engine.control)
    finally:
        engine.control.resume()
    assert "'paused' is True" in str(caught.value)


def test_a_wrong_secret_is_named(config: RunConfig, engine: EngineServer) -> None:
    with pytest.raises(EngineError, match="answered 403"):
        handshake.greet_engine(config, EngineControl(engine.endpoint.url, "not the secret, surely"))


def test_a_router_that_does_not_answer_is_a_deadline(engine: EngineServer) -> None:
    claim = PortClaim(None, what="nobody")
    claim._socket.listen(1)  # takes connections, answers none
    with pytest.raises(DeadlineError, match=r"the router at .* did not finish '/workers' within 0\.2 s"):
        RouterClient("127.0.0.1", claim.port).worker_health(seconds=0.2)
    claim.close()
