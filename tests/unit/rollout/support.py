"""A small tokenizer, a flat `args`, and a server that speaks the engines' wire format in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vime.config import SECTIONS, ArgsView, RunConfig

CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_tokenizer(folder: Path, template: str | None = CHATML, merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """One token a character (and one a merge), ChatML; saved in `folder`, which then serves as --hf-checkpoint."""
    pieces = [*SPECIAL, *CHARACTERS, *(first + second for first, second in merges)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), unk_token="<|endoftext|>"))
    inner.pre_tokenizer = pre_tokenizers.Split(pattern="\n", behavior="isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=["<|im_start|>"]
    )
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_args(runtime: dict[str, Any] | None = None, **values: Any) -> ArgsView:
    """The flat view of a configuration in which only `values` differ from the defaults."""
    home = {f.name: section for section, cls in SECTIONS.items() for f in fields(cls)}
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        by_section.setdefault(home[name], {})[name] = value
    sections = {section: SECTIONS[section](**chosen) for section, chosen in by_section.items()}
    defaults = {"vllm_router_ip": None, "vllm_router_port": None, "num_engines": 1, "run_dir": "."}
    return RunConfig(**sections).runtime_args(**(defaults | (runtime or {})))


def reply_of(text: str, tokenizer: Any, *, reason: str = "stop", version: str = "3") -> dict[str, Any]:
    """An engine's reply whose tokens spell `text` (the end token added when it stopped)."""
    tokens = tokenizer.encode(text, add_special_tokens=False) + ([tokenizer.eos_token_id] if reason == "stop" else [])
    choice = {
        "index": 0,
        "finish_reason": reason,
        "token_ids": tokens,
        "logprobs": {"content": [{"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": []} for token in tokens]},
        "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}] if tokens else [],
    }
    return {"request_id": "generate-tokens-1", "choices": [choice]}


Answer = Callable[[dict[str, Any], int], Any]


@dataclass
class WireServer:
    """Replies with what `answer(request, number)` gives: a dict, a web.Response, or a coroutine of one.

    A request for n choices gets those of n answers (or the first that is a web.Response); `number` counts answers.
    """

    answer: Answer
    port: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    clients: list[Any] = field(default_factory=list)  # of each request: the other end of its connection
    answers: int = 0
    in_flight: int = 0
    most_in_flight: int = 0

    @property
    def runtime(self) -> dict[str, Any]:
        """What `args` says of the router."""
        return {"vllm_router_ip": "127.0.0.1", "vllm_router_port": self.port}

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request."""
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            body = await request.json() if request.can_read_body else {}
            self.requests.append(body)
            self.headers.append(request.headers)
            assert request.transport is not None
            self.clients.append(request.transport.get_extra_info("peername"))
            count = (body.get("sampling_params") or {}).get("n", 1) if isinstance(body, dict) else 1
            given = await asyncio.gather(*(self._answer(body) for _ in range(count)))
            refused = [one for one in given if isinstance(one, web.StreamResponse)]
            return refused[0] if refused else web.json_response(given[0] if count == 1 else joined(given))
        finally:
            self.in_flight -= 1

    async def _answer(self, body: Any) -> Any:
        given = self.answer(body, self.answers)
        self.answers += 1
        return await given if asyncio.iscoroutine(given) else given


def joined(replies: list[dict[str, Any]]) -> dict[str, Any]:
    """One reply with the choices of several, numbered; in reverse, for the order on the wire says nothing."""
    choices = [{**choice, "index": index} for index, choice in enumerate(choice for reply in replies for choice in reply["choices"])]
    return {**replies[0], "choices": choices[::-1]}


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[WireServer]:
    """A WireServer on a free port of this event loop."""
    server = WireServer(answer)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    server.port = site._server.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        await runner.cleanup()


def run[T](work: Coroutine[Any, Any, T], seconds: float = 30.0) -> T:
    """Run a coroutine to its end, or fail."""

    async def bounded() -> T:
        async with asyncio.timeout(seconds):
            return await work

    return asyncio.run(bounded())
