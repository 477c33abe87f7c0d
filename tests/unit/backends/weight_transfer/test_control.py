"""The control client against a small server that answers as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from vime.backends.weight_transfer.control import SECRET_HEADER, EngineControl, EngineEndpoint
from vime.errors import DeadlineError, EngineError

SECRET = "0123456789abcdef"


class Script(ThreadingHTTPServer):
    """Answers come from `answers` in order, the last one for ever; a None answer is none at all until the test ends."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, Any] | None] = [(200, {})]
        self.seen: list[tuple[str, str, str | None, Any]] = []
        self.over = threading.Event()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Script

    def do_POST(self) -> None:
        """Record, then answer."""
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.seen.append((self.command, self.path, self.headers.get(SECRET_HEADER), body))
        answer = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        if answer is None:
            self.server.over.wait(20.0)
            return
        data = answer[1] if isinstance(answer[1], bytes) else json.dumps(answer[1]).encode()
        self.send_response(answer[0])
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST  # noqa: N815 - the base class looks for this name

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""


@pytest.fixture
def server() -> Iterator[Script]:
    script = Script()
    thread = threading.Thread(target=script.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield script
    script.over.set()
    script.shutdown()
    thread.join()
    script.server_close()


@pytest.fixture
def control(server: Script) -> EngineControl:
    return EngineControl(f"http://127.0.0.1:{server.server_port}", SECRET, name="engine 4", seconds=5.0)


def test_a_call_carries_the_secret_and_its_arguments(server: Script, control: EngineControl) -> None:
    control.pause("abort")
    control.finish_weight_update("7")
    assert server.seen == [
        ("POST", "/pause?mode=abort", SECRET, None),
        ("POST", "/finish_weight_update", SECRET, {"weight_version": "7"}),
    ]


def test_a_5xx_is_tried_again(server: Script, control: EngineControl) -> None:
    server.answers = [(503, {"error": "busy"}), (500, {}), (200, {"weight_version": "3"})]
    assert control.weight_version() == "3"
    assert len(server.seen) == 3


def test_a_4xx_is_an_error_at_once_with_the_engines_words(server: Script, control: EngineControl) -> None:
    server.answers = [(400, {"error": {"message": "Token id 500 is out of vocabulary"}})]
    with pytest.raises(EngineError, match=r"engine 4 at http.*answered 400: Token id 500 is out of vocabulary"):
        control.resume()
    assert len(server.seen) == 1


def test_a_step_of_a_weight_update_is_never_repeated(server: Script, control: EngineControl) -> None:
    server.answers = [(500, {"error": "worker failed"}), (200, {})]
    with pytest.raises(EngineError, match="/update_weights: answered 500: worker failed"):
        control.update_weights({})
    assert len(server.seen) == 1


def test_an_engine_that_does_not_answer_is_a_deadline_with_its_name_and_the_phase(server: Script, control: EngineControl) -> None:
    server.answers = [None]
    with pytest.raises(DeadlineError, match=r"engine 4 at .* did not finish '/start_weight_update' within 0\.2 s"):
        control.start_weight_update(seconds=0.2)


def test_an_engine_that_is_not_there_is_named(server: Script) -> None:
    server.server_close()
    gone = EngineControl(f"http://127.0.0.1:{server.server_port}", SECRET, name="engine 9")
    assert not gone.healthy()
    with pytest.raises(EngineError, match=r"engine 9 at .*cannot be reached"):
        gone.pause()


def test_a_path_is_served_unless_it_is_not_found(server: Script, control: EngineControl) -> None:
    server.answers = [(405, {"detail": "Method Not Allowed"}), (200, {}), (404, {"detail": "Not Found"})]
    assert [control.serves(path) for path in ("/pause", "/version", "/no_such_path")] == [True, True, False]


def test_an_engine_of_another_secret_is_an_error(server: Script, control: EngineControl) -> None:
    server.answers = [(403, {"error": {"message": "open to the framework alone"}})]
    with pytest.raises(EngineError, match="answered 403: open to the framework alone"):
        control.serves("/pause")


def test_prompt_log_probs_are_those_of_the_prompts_own_tokens(server: Script, control: EngineControl) -> None:
    rows = [None, {"6": {"logprob": -1.5}, "9": {"logprob": -0.1}}, {"7": {"logprob": -2.5}}]
    choice = {"weight_versions": [{"version": "2", "start": 0, "end": 1}]}
    server.answers = [(200, {"prompt_logprobs": rows, "choices": [choice]})]
    assert control.prompt_log_probs([5, 6, 7]) == ([-1.5, -2.5], "2")


def test_a_metric_is_summed_over_its_labels(server: Script, control: EngineControl) -> None:
    server.answers = [(200, b'# HELP a text\na{engine="0"} 2.0\na{engine="1"} 3.5\na_total{engine="0"} 9\n')]
    assert control.metric("a") == 5.5
    assert control.metric("b") == 0.0


def test_a_cache_that_cannot_be_reset_is_an_error(server: Script, control: EngineControl) -> None:
    server.answers = [(200, {"success": False})]
    with pytest.raises(EngineError, match="could not reset its prefix cache"):
        control.reset_prefix_cache()


def test_a_url_without_a_port_is_refused() -> None:
    with pytest.raises(ValueError, match="expected http://HOST:PORT"):
        EngineControl("127.0.0.1", SECRET)


def test_the_secret_is_not_shown_by_an_endpoint() -> None:
    assert SECRET not in repr(EngineEndpoint(name="engine 0", url="http://127.0.0.1:1", secret=SECRET))
