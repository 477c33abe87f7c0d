"""What a probe makes of an engine's answers; the engine is a small server that answers as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

from vime.backends.vllm_utils.health import EngineWatch, find_illness
from vime.backends.weight_transfer.control import EngineControl, EngineEndpoint
from vime.config.sections import FaultToleranceConfig

WELL = {"choices": [{"token_ids": [1]}], "prompt_logprobs": [None, {"2": {"logprob": -1.0}}, {"3": {"logprob": -1.0}}]}


@dataclass
class Engine:
    """`reply` to a generation: an object, a status, or None for silence. `counts`: tokens at each look, the last for ever."""

    reply: Any = field(default_factory=lambda: WELL)
    paused: Any = False
    counts: list[float] = field(default_factory=lambda: [0.0])
    over: threading.Event = field(default_factory=threading.Event)
    probed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    url: str = ""

    def answer(self, path: str) -> tuple[int, bytes] | None:
        if path == "/is_paused":
            return None if self.paused is None else (200, json.dumps({"is_paused": self.paused}).encode())
        if path == "/metrics":
            count = self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]
            return 200, f'vllm:generation_tokens_total{{engine="0"}} {count}\n'.encode()
        if path == "/health":
            return 200, b""
        self.probed.release()
        if self.reply is None:
            return None
        return (self.reply, b"{}") if isinstance(self.reply, int) else (200, json.dumps(self.reply).encode())

    @property
    def control(self) -> EngineControl:
        return EngineControl(self.url, "secret", name="engine 0")


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            answer = made.answer(urlsplit(self.path).path)
            if answer is None:
                made.over.wait(30.0)
                return
            self.send_response(answer[0])
            self.send_header("content-length", str(len(answer[1])))
            self.end_headers()
            self.wfile.write(answer[1])

        do_POST = do_GET  # noqa: N815 - the name that http.server asks for

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_engine_that_generates_is_well(engine: Engine) -> None:
    assert find_illness(engine.control, 30.0) is None


def test_an_engine_that_is_silent_and_generates_for_nobody_is_ill(engine: Engine) -> None:
    engine.reply = None
    found = find_illness(engine.control, 0.2)
    assert found is not None
    assert found.startswith("it generated nothing for 0.2 s: engine 0 at ")


def test_an_engine_whose_queue_moves_is_well(engine: Engine) -> None:
    engine.reply, engine.counts = None, [10.0, 10.0, 11.0]  # two metrics before; then one token more
    assert find_illness(engine.control, 0.2) is None


def test_an_engine_that_refuses_the_probe_is_well_while_its_queue_moves_and_else_ill(engine: Engine) -> None:
    engine.reply, engine.counts = 503, [10.0, 10.0, 11.0]
    assert find_illness(engine.control, 30.0) is None
    assert str(find_illness(engine.control, 0.2)).startswith("it generated nothing for 0.2 s: engine 0 at ")


def test_a_paused_engine_is_well_as_long_as_its_core_answers(engine: Engine) -> None:
    engine.paused, engine.reply = True, None
    assert find_illness(engine.control, 30.0) is None
    assert not engine.probed.acquire(blocking=False)
    engine.paused = None
    found = find_illness(engine.control, 0.2)
    assert found is not None
    assert "did not finish '/is_paused' within 0.2 s" in found


def test_an_engine_that_is_gone_is_ill() -> None:
    found = find_illness(EngineControl("http://127.0.0.1:9", "secret", name="engine 0"), 30.0)
    assert found is not None
    assert "cannot be reached" in found


def test_a_watch_probes_again_and_again_until_the_engine_is_ill(engine: Engine) -> None:
    config = FaultToleranceConfig(
        use_fault_tolerance=True,
        rollout_health_check_interval=0.01,
        rollout_health_check_timeout=5.0,
        rollout_health_check_first_wait=0.0,
    )
    watch = EngineWatch(EngineEndpoint(name="engine 0", url=engine.url, secret="secret"), config)
    assert engine.probed.acquire(timeout=30.0)
    assert engine.probed.acquire(timeout=30.0)
    assert watch.illness is None
    engine.reply = {"choices": []}
    watch._thread.join(60.0)
    assert watch.illness is not None
    assert "0 prompt log-probs for 3 tokens" in watch.illness


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"reply": WELL | {"choices": []}}, "IndexError"),
        ({"reply": WELL | {"prompt_logprobs": [None, {}, {}]}}, "KeyError"),
        ({"counts": ["?"]}, "ValueError"),
    ],
)
def test_an_engine_whose_replies_cannot_be_read_is_ill(engine: Engine, told: dict[str, Any], said: str) -> None:
    for name, value in told.items():
        setattr(engine, name, value)
    config = FaultToleranceConfig(use_fault_tolerance=True, rollout_health_check_first_wait=0.0)
    watch = EngineWatch(EngineEndpoint(name="engine 0", url=engine.url, secret="secret"), config)
    watch._thread.join(60.0)
    assert str(watch.illness).startswith("its answers to a probe cannot be read: ")
    assert said in str(watch.illness)


def test_a_watch_that_is_stopped_finds_nothing(engine: Engine) -> None:
    watch = EngineWatch(EngineEndpoint(name="engine 0", url=engine.url, secret="secret"), FaultToleranceConfig())
    watch.stop()
    watch._thread.join(30.0)
    assert not watch._thread.is_alive()
    assert watch.illness is None
