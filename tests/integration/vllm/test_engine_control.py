"""The control client against a real engine."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from vime.backends.vllm_utils.server import EngineServer

pytestmark = pytest.mark.integration

LONG = {"token_ids": [10, 20, 30], "sampling_params": {"max_tokens": 480, "temperature": 1.0, "logprobs": 0, "seed": 3, "ignore_eos": True}}


def test_pause_and_resume(engine: EngineServer) -> None:
    control = engine.control
    control.pause("keep")
    assert control.is_paused()
    control.resume()
    assert not control.is_paused()


def test_abort_returns_what_a_request_has_so_far(engine: EngineServer) -> None:
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(engine.control.call("POST", "/inference/v1/generate", LONG, seconds=60.0)))
    thread.start()
    aborted = 0
    for _ in range(500):
        aborted = engine.control.abort()
        if aborted or not thread.is_alive():
            break
        thread.join(0.01)
    thread.join(60.0)
    choice = answers[0]["choices"][0]
    assert aborted == 1
    assert choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) < 480


def test_the_engines_log_holds_no_secret(engine: EngineServer, tmp_path: Path) -> None:
    assert engine.endpoint.secret not in engine.log_tail(100_000)
