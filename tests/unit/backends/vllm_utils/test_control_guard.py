"""The guard in front of an engine's control paths."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from vime.backends.vllm_utils.control_guard import ADAPTER_ENV, OPEN_PATHS, SECRET_ENV, ControlGuard
from vime.backends.weight_transfer.control import SECRET_HEADER

SECRET = "a secret of enough characters"


def status(monkeypatch: pytest.MonkeyPatch, path: str, headers: list[tuple[bytes, bytes]], kind: str = "http") -> Any:
    """What a client sees: 200 when the guard lets the request through."""
    monkeypatch.setenv(SECRET_ENV, SECRET)
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append({"status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the guard reads no bodies")

    asyncio.run(ControlGuard(app)({"type": kind, "path": path, "headers": headers}, receive, send))
    return sent[0].get("status", sent[0].get("code"))


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_generation_is_open(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    assert status(monkeypatch, path, []) == 200


@pytest.mark.parametrize(
    "path", ["/pause", "/update_weights", "/collective_rpc", "/openapi.json", "/never/heard/of", "/v1/models/", "//health"]
)
def test_everything_else_needs_the_secret(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    name = SECRET_HEADER.encode()
    assert status(monkeypatch, path, []) == 403
    assert status(monkeypatch, path, [(name, b"wrong")]) == 403
    assert status(monkeypatch, path, [(name, SECRET.encode()), (name, b"wrong")]) == 403
    assert status(monkeypatch, path, [(name, SECRET.encode())]) == 200


def test_a_websocket_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert status(monkeypatch, "/v1/realtime", [], kind="websocket") == 1008


@pytest.mark.parametrize("secret", ["", "short"])
def test_an_engine_without_a_secret_does_not_start(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    monkeypatch.setenv(SECRET_ENV, secret)
    with pytest.raises(RuntimeError, match="at least 16 characters"):
        ControlGuard(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({"model": "policy", "token_ids": [1]}, [], 200),
        ({"token_ids": [1]}, [], 400),
        ({"model": "vime"}, [], 400),
        ([1], [], 400),
        ({"token_ids": [1]}, [(SECRET_HEADER.encode(), SECRET.encode())], 200),
    ],
)
def test_where_the_policy_is_an_adapter_a_request_names_it(
    monkeypatch: pytest.MonkeyPatch, body: Any, headers: list[tuple[bytes, bytes]], expected: int
) -> None:
    monkeypatch.setenv(SECRET_ENV, SECRET)
    monkeypatch.setenv(ADAPTER_ENV, "policy")
    whole = json.dumps(body).encode()
    parts = [{"body": whole[:5], "more_body": True}, {"body": whole[5:]}]
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        first = await receive()
        rest = await receive()
        sent.append({"status": 200, "body": first["body"] + rest["body"]})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return parts.pop(0)

    scope = {"type": "http", "method": "POST", "path": "/inference/v1/generate", "headers": headers}
    asyncio.run(ControlGuard(app)(scope, receive, send))
    assert sent[0]["status"] == expected
    if expected == 200:
        assert sent[0]["body"] == whole
    else:
        assert b'say \\"model\\": \\"policy\\"' in sent[1]["body"]
