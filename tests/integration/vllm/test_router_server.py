"""vllm-router in front of an engine: what passes, and what must not."""

from __future__ import annotations

import http.client
from pathlib import Path

import pytest

from vime.backends.vllm_utils.handshake import router_disagreements
from vime.backends.vllm_utils.process import PortClaim
from vime.backends.vllm_utils.router import ExternalRouter, RouterServer
from vime.backends.vllm_utils.server import EngineServer
from vime.backends.weight_transfer.control import SECRET_HEADER, EngineControl
from vime.config import RunConfig
from vime.errors import EngineError, ResourceError

pytestmark = pytest.mark.integration

BODY = {"token_ids": [10, 20, 30], "sampling_params": {"max_tokens": 5, "temperature": 1.0, "logprobs": 0, "seed": 3, "ignore_eos": True}}
CONTROL_PATHS = ["/pause?mode=abort", "/update_weights", "/collective_rpc", "/sleep", "/abort_requests", "/weight_checker", "/server_info"]


def test_generation_through_the_router_is_the_engines_own(engine: EngineServer, router: RouterServer) -> None:
    direct = engine.control.call("POST", "/inference/v1/generate", BODY)["choices"]
    routed = EngineControl(router.url, "none").call("POST", "/inference/v1/generate", BODY)["choices"]
    assert routed == direct
    assert len(routed[0]["token_ids"]) == 5


@pytest.mark.parametrize("path", CONTROL_PATHS)
def test_control_through_the_router_is_refused_even_with_the_secret(engine: EngineServer, router: RouterServer, path: str) -> None:
    connection = http.client.HTTPConnection(router.host, router.port, timeout=20)
    connection.request("POST", path, "{}", {SECRET_HEADER: engine.endpoint.secret, "content-type": "application/json"})
    assert connection.getresponse().status in (403, 404, 405)
    connection.close()
    assert not engine.control.is_paused()


def test_control_of_the_engine_needs_the_secret(engine: EngineServer) -> None:
    with pytest.raises(EngineError, match="403"):
        EngineControl(engine.endpoint.url, "wrong secret, wrong secret").pause()
    assert not engine.control.is_paused()


def test_workers_come_and_go(engine: EngineServer, router: RouterServer) -> None:
    url = engine.endpoint.url
    router.remove_worker(url)
    assert router.workers() == []
    router.add_worker(url)
    assert router.workers() == [url]
    assert EngineControl(router.url, "none").call("POST", "/inference/v1/generate", BODY)["choices"]


@pytest.mark.parametrize("policy", ["random", "round_robin", "cache_aware", "consistent_hash", "sticky_least_loaded"])
def test_each_policy_of_the_router_passes_requests_on_and_is_the_one_it_says(engine: EngineServer, tmp_path: Path, policy: str) -> None:
    log = tmp_path / "router.log"
    server = RouterServer([engine.endpoint.url], log_path=log, router_tokens=["--policy", policy])
    try:
        server.wait_ready(60.0)
        assert EngineControl(server.url, "none").call("POST", "/inference/v1/generate", BODY)["choices"]
        assert server.policy() == policy
        assert router_disagreements(RunConfig(router_tokens=("--policy", policy)), [engine.endpoint.url], server) == []
    finally:
        server.stop()


def test_a_router_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    server = RouterServer(["http://127.0.0.1:9"], log_path=tmp_path / "router.log", router_tokens=["--policy", "nonsense"])
    with pytest.raises(EngineError, match="invalid choice: 'nonsense'"):
        server.wait_ready(60.0)
    server.stop()


def test_a_fixed_port_that_is_taken_is_refused_at_once(router: RouterServer, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=f"Port {router.port} for the router"):
        RouterServer([], log_path=tmp_path / "router.log", port=router.port)


def test_a_claimed_port_is_given_to_nobody_else() -> None:
    claims = [PortClaim(None, what="a test") for _ in range(50)]
    assert len({claim.port for claim in claims}) == 50
    for claim in claims:
        claim.close()


def test_a_router_that_runs_already_takes_our_engines_and_gives_them_back(engine: EngineServer, router: RouterServer) -> None:
    router.remove_worker(engine.endpoint.url)
    other = ExternalRouter(router.host, router.port, [engine.endpoint.url])
    assert router.workers() == [engine.endpoint.url]
    other.stop()
    assert router.workers() == []
    router.add_worker(engine.endpoint.url)


def test_a_router_that_is_not_there_is_named() -> None:
    claim = PortClaim(None, what="nobody")  # bound, but nobody listens
    with pytest.raises(EngineError, match=f"no vllm-router answers at 127.0.0.1:{claim.port} "):
        ExternalRouter("127.0.0.1", claim.port, [])
    claim.close()
