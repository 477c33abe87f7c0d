"""ASGI middleware inside vLLM's API server: everything that is not generation needs the secret that only the framework holds.

vllm-router passes any path through to the engines, so what can reach the router could pause an engine or change its weights.
vLLM's own --api-key guards generation and leaves the control paths open; this is the other way round. It also keeps an engine
whose weights are half loaded from being resumed: from the start of a weight update until one is finished under a version, /resume
is refused, whoever asks. Where the policy is an adapter, a request from outside that does not name it is refused: it would be
answered by the model without the adapter. Installed with `--middleware vime.backends.vllm_utils.control_guard.ControlGuard`; the
secret comes in the environment.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vime.backends.weight_transfer.control import SECRET_HEADER

__all__ = ["ADAPTER_ENV", "OPEN_PATHS", "SECRET_ENV", "ControlGuard"]

SECRET_ENV = "VIME_CONTROL_SECRET"
ADAPTER_ENV = "VIME_POLICY_ADAPTER"  # the adapter's name, where there is one

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

GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate"})
REPLACING = frozenset({"/start_weight_update", "/v1/load_lora_adapter"})  # from here on what is there is no version
VERSIONED = frozenset({"/finish_weight_update", "/update_weight_version"})  # what is there has a version again

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ControlGuard:
    """Lets through OPEN_PATHS, and any request that carries the secret; answers the rest with 403."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._torn = False  # weights are being replaced, or that was broken off
        self._adapter = os.environ.get(ADAPTER_ENV)
        self._secret = os.environ.get(SECRET_ENV, "").encode()
        if len(self._secret) < 16:
            raise RuntimeError(f"{SECRET_ENV} must hold at least 16 characters: without a secret anyone could change the weights.")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path")
        if self._adapter is not None and path in GENERATING_PATHS and not self._authorised(scope):
            await self._named(scope, receive, send)
        elif scope["type"] == "lifespan" or path in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif not self._authorised(scope):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await _answer(send, 403, f"{path} controls the engine and is open to the framework alone.")
        elif scope.get("method") == "POST" and path == "/resume" and self._torn:
            await _answer(send, 409, "the weights are half loaded: finish a whole weight update first.")
        elif scope.get("method") == "POST" and path in VERSIONED:
            await self._finish(scope, receive, send)
        else:
            self._torn = self._torn or (scope.get("method") == "POST" and path in REPLACING)
            await self._app(scope, receive, send)

    async def _finish(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; the weights are whole once it succeeded, if it names a version (one without only closes the update)."""
        body, replay = await _read(receive)
        named = b'"weight_version"' in body or b'"new_version"' in body

        async def watched(message: MutableMapping[str, Any]) -> None:
            if named and message["type"] == "http.response.start" and message["status"] == 200:
                self._torn = False
            await send(message)

        await self._app(scope, replay, watched)

    async def _named(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request for a generation on if it is for the adapter."""
        body, replay = await _read(receive)
        try:
            asked = json.loads(body).get("model")
        except (ValueError, AttributeError):
            asked = None
        if asked == self._adapter:
            await self._app(scope, replay, send)
        else:
            await _answer(send, 400, f'with --lora-sync adapter the policy is an adapter: say "model": "{self._adapter}" in the request.')

    def _authorised(self, scope: Scope) -> bool:
        given = [value for name, value in scope.get("headers", []) if name == SECRET_HEADER.encode()]
        return len(given) == 1 and secrets.compare_digest(given[0], self._secret)


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    """A request's body, and what hands it out once more."""
    messages = [await receive()]
    while messages[-1].get("more_body"):
        messages.append(await receive())

    async def replay() -> MutableMapping[str, Any]:
        return messages.pop(0) if messages else await receive()

    return b"".join(message.get("body", b"") for message in messages), replay


async def _answer(send: Send, status: int, text: str) -> None:
    body = json.dumps({"error": {"message": text, "type": "PermissionDeniedError", "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
