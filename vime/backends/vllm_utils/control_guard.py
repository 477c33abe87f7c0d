"""ASGI middleware inside vLLM's API server: everything that is not generation needs the secret that only the framework holds.

vllm-router passes any path through to the engines, so what can reach the router could pause an engine or change its weights.
vLLM's own --api-key guards generation and leaves the control paths open; this is the other way round. Installed with
`--middleware vime.backends.vllm_utils.control_guard.ControlGuard`; the secret comes in the environment.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vime.backends.weight_transfer.control import SECRET_HEADER

__all__ = ["OPEN_PATHS", "SECRET_ENV", "ControlGuard"]

SECRET_ENV = "VIME_CONTROL_SECRET"

OPEN_PATHS = frozenset(
    {
        "/health",
        "/ping",
        "/version",
        "/metrics",
        "/metrics/",
        "/load",
        "/tokenize",
        "/detokenize",
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        "/inference/v1/generate",
    }
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ControlGuard:
    """Lets through OPEN_PATHS, and any request that carries the secret; answers the rest with 403."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._secret = os.environ.get(SECRET_ENV, "").encode()
        if len(self._secret) < 16:
            raise RuntimeError(f"{SECRET_ENV} must hold at least 16 characters: without a secret anyone could change the weights.")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS or self._authorised(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _refuse(scope, send)

    def _authorised(self, scope: Scope) -> bool:
        given = [value for name, value in scope.get("headers", []) if name == SECRET_HEADER.encode()]
        return len(given) == 1 and secrets.compare_digest(given[0], self._secret)


async def _refuse(scope: Scope, send: Send) -> None:
    text = f"{scope.get('path')} controls the engine and is open to the framework alone."
    body = json.dumps({"error": {"message": text, "type": "PermissionDeniedError", "code": 403}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})
