"""Who gives memory back when, as an engine's server and the trainers see it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from vime.backends.weight_transfer.control import EngineEndpoint
from vime.config import RunConfig
from vime.config import sections as s
from vime.ray.turns import Turns

Events = list[str]


@pytest.fixture
def seen() -> Events:
    return []


@pytest.fixture
def endpoint(seen: Events) -> Iterator[EngineEndpoint]:
    """An engine's control port that notes what it is asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(self.path)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *unused: Any) -> None:
            return None

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield EngineEndpoint(name="engine 0", url=f"http://127.0.0.1:{server.server_port}", secret="s" * 16)
    server.shutdown()
    thread.join()
    server.server_close()


class Group:
    def __init__(self, seen: Events) -> None:
        self._seen = seen

    def give_back(self, *, weights: bool) -> None:
        self._seen.append(f"trainer gives back, weights {weights}")


class Engines:
    def __init__(self, endpoint: EngineEndpoint) -> None:
        self._endpoint = endpoint

    def receivers(self) -> list[EngineEndpoint]:
        return [self._endpoint]


def turns(endpoint: EngineEndpoint, seen: Events, **cluster: Any) -> Turns:
    config = RunConfig(cluster=s.ClusterConfig(**cluster))
    return Turns(config, Group(seen), Engines(endpoint))  # type: ignore[arg-type]


def step(made: Turns, seen: Events) -> None:
    made.trainer()
    seen.append("train")
    with made.sync():
        seen.append("sync")


def test_colocated_each_side_works_while_the_other_holds_no_memory(endpoint: EngineEndpoint, seen: Events) -> None:
    made = turns(endpoint, seen, device="cuda", colocate=True)
    for _ in range(2):
        step(made, seen)
    once = ["/sleep?level=2", "train", "trainer gives back, weights False", "/wake_up", "sync", "trainer gives back, weights True"]
    assert seen == once * 2


def test_a_side_that_keeps_its_memory_is_left_alone(endpoint: EngineEndpoint, seen: Events) -> None:
    step(turns(endpoint, seen, device="cuda", colocate=True, offload_train=False), seen)
    assert seen == ["/sleep?level=2", "train", "/wake_up", "sync"]
    seen.clear()
    step(turns(endpoint, seen, device="cuda", colocate=True, offload_rollout=False), seen)
    assert seen == ["train", "trainer gives back, weights False", "sync", "trainer gives back, weights True"]


def test_without_colocate_nothing_is_moved(endpoint: EngineEndpoint, seen: Events) -> None:
    step(turns(endpoint, seen), seen)
    assert seen == ["train", "sync"]
