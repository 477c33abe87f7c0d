"""What the installed vLLM lacks of what the framework asks engines for, and the middleware that puts it in: nothing of vLLM is patched.

Releases before weight versions were built in (0.26, the last for torch 2.11) do not say under which weights a token was sampled, and
name a log-prob's token only in text. Which of the two the installed one is, its own files tell: importing them would take seconds.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from vime.backends.vllm_utils.control_guard import App, Receive, Scope, Send

__all__ = ["Translation", "has_scale_out_flag", "needs_translation"]

GENERATE = "/inference/v1/generate"
FRESH = "default"  # the weight version of an engine that has been sent none
_NAMED = "token_id:"  # before the token's number, in the text that stands for it


def has_scale_out_flag(root: Path | None = None) -> bool:
    """The installed vLLM serves token ids only with --enable-scale-out; older ones always do. `root`: where vLLM lies."""
    return _says(root, "entrypoints", "cli_args.py", "enable_scale_out")


def needs_translation(root: Path | None = None) -> bool:
    """The installed vLLM's replies do not tell weight versions. `root`: where vLLM lies."""
    return not _says(root, "entrypoints/scale_out", "protocol.py", "weight_versions")


def _says(root: Path | None, folder: str, name: str, word: str) -> bool:
    if root is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            return True  # without vLLM nothing is started
        root = Path(spec.submodule_search_locations[0])
    return any(word in path.read_text(encoding="utf-8") for path in (root / folder).rglob(name))


class Translation:
    """Remembers the version that `finish_weight_update` gave, tells it, and writes it into replies.

    A reply during which the weights changed tells no version: how many of its tokens came before is not known here.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._version = FRESH
        self._updates = 0  # begun and ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, method = scope.get("path"), scope.get("method")
        if path == "/weight_info" and method == "GET":
            await _answer(send, 200, [(b"content-type", b"application/json")], json.dumps({"weight_version": self._version}).encode())
        elif path == "/start_weight_update" and method == "POST":
            self._updates += 1
            await self._app(scope, receive, send)
        elif path == "/finish_weight_update" and method == "POST":
            await self._finish(scope, receive, send)
        elif path == GENERATE and method == "POST":
            await self._generate(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _finish(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if message["type"] != "http.request" or not message.get("more_body"):
                break
        given = (json.loads(body) if body else {}).get("weight_version")
        held: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> MutableMapping[str, Any]:
            return held.pop() if held else await receive()

        async def watch(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self._updates += 1
                self._version = self._version if given is None else str(given)
            await send(message)

        await self._app(scope, again, watch)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        before, version = self._updates, self._version
        start: dict[str, Any] = {}
        parts: list[bytes] = []

        async def collect(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                if not _is_json(start):
                    await send(message)
                return
            if not _is_json(start):
                await send(message)
                return
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                known = version if self._updates == before else None
                await _answer(send, start["status"], start["headers"], _translated(b"".join(parts), known))

        await self._app(scope, receive, collect)


def _is_json(start: dict[str, Any]) -> bool:
    headers = dict(start.get("headers", []))
    return start.get("status") == 200 and headers.get(b"content-type", b"").startswith(b"application/json")


def _translated(body: bytes, version: str | None) -> bytes:
    """A reply with `token_id` in each log-prob and, where `version` is known, the span of tokens that it covers."""
    reply = json.loads(body)
    for choice in reply.get("choices") or ():
        count = len(choice.get("token_ids") or ())
        if version is not None and not choice.get("weight_versions"):
            choice["weight_versions"] = [{"version": version, "start": 0, "end": count}]
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            for one in (entry, *(entry.get("top_logprobs") or ())):
                token = one.pop("token", "")
                if token.startswith(_NAMED):
                    one["token_id"] = int(token.removeprefix(_NAMED))
    return json.dumps(reply, separators=(",", ":")).encode()


async def _answer(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    await send({"type": "http.response.start", "status": status, "headers": [*kept, (b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})
