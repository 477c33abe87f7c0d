"""A receiver of weight updates as a process of its own: vLLM's protocol over real shared memory, behind the real guard.

Its "model" is its tensors themselves, replaced in place as vLLM's are, so that a half-loaded receiver really holds a mix; its
log-probs are the first number of each tensor. It can be told to die at any moment of any call.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import threading
from collections import Counter
from collections.abc import MutableMapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import xxhash

from vime.backends.vllm_utils.control_guard import SECRET_ENV, ControlGuard
from vime.backends.weight_transfer.segment import Segment

SECRET = "a secret of enough characters"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """At the `count`-th call of `path`, `signal` comes before it, half way through it, or after it and before the reply."""

    path: str
    count: int
    moment: str
    signal: int = signal.SIGKILL


class Receiver:
    """The state, and what each path does to it."""

    def __init__(self, fault: Fault | None) -> None:
        self.fault, self.calls = fault, Counter[str]()
        self.held: dict[str, bytes] = {}
        self.received: dict[str, list[Any]] = {}
        self.version, self.open, self.paused = "default", False, False
        self.segment: Segment | None = None
        self.running = threading.Event()
        self.running.set()

    def reach(self, path: str, moment: str) -> None:
        """Die here, if that was asked for."""
        fault = self.fault
        if fault is not None and (fault.path, fault.moment) == (path, moment) and self.calls[path] == fault.count:
            os.kill(os.getpid(), fault.signal)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """One call."""
        self.calls[path] += 1
        self.reach(path, "before")
        result = getattr(self, path.strip("/").replace("/", "_"))(body)
        self.reach(path, "after")
        return result

    def pause(self, _: Any) -> tuple[int, dict[str, Any]]:
        self.paused = True
        self.running.clear()
        return 200, {}

    def resume(self, _: Any) -> tuple[int, dict[str, Any]]:
        self.paused = False
        self.running.set()
        return 200, {}

    def reset_prefix_cache(self, _: Any) -> tuple[int, dict[str, Any]]:
        return 200, {"success": True}

    def start_weight_update(self, _: Any) -> tuple[int, dict[str, Any]]:
        if self.open:
            return 500, {"error": "a weight update is already active"}
        self.open, self.received = True, {}
        return 200, {}

    def update_weights(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        info = body["update_info"]
        segment = self.segment
        if segment is None or segment.name != info["segment"]:  # the name is gone after the first bucket
            segment = self.segment = Segment.attach(info["segment"])
        for number, spec in enumerate(info["tensors"]):
            if number == len(info["tensors"]) // 2:
                self.reach("/update_weights", "half way")
            data = segment.memory[spec["offset"] : spec["offset"] + spec["num_bytes"]]
            self.held[spec["name"]] = data
            self.received[spec["name"]] = [spec["dtype"], spec["shape"], xxhash.xxh3_128_hexdigest(data)]
        return 200, {}

    def collective_rpc(self, _: Any) -> tuple[int, dict[str, Any]]:
        return 200, {"results": [{"tensors": self.received, "unloaded": []}]}

    def finish_weight_update(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.open = False
        self.version = body.get("weight_version") or self.version
        return 200, {}

    def inference_v1_generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.running.wait(60.0)
        values = [struct.unpack("<f", self.held[name][:4])[0] for name in sorted(self.held)]
        tokens = body["token_ids"]
        rows = [None, *({str(token): {"logprob": values[token]}} for token in tokens[1:])]
        return 200, {"prompt_logprobs": rows, "choices": [{"weight_versions": [{"version": self.version}]}]}

    def state(self, _: Any) -> tuple[int, dict[str, Any]]:
        """What the test looks at: the first number of each tensor, the version, and whether it is paused."""
        values = {name: struct.unpack("<f", data[:4])[0] for name, data in self.held.items()}
        return 200, {"values": values, "version": self.version, "paused": self.paused}


def serve(fault: Fault | None, told: Any) -> None:
    """Serve for ever; the port goes to `told`."""
    os.environ[SECRET_ENV] = SECRET
    receiver = Receiver(fault)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        status, answer = receiver.answer(scope["path"], json.loads((await receive())["body"] or b"{}"))
        await send({"type": "http.response.start", "status": status})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    guard = ControlGuard(app)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            sent: list[MutableMapping[str, Any]] = []
            headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
            scope = {"type": "http", "method": self.command, "path": self.path.partition("?")[0], "headers": headers}

            async def receive() -> MutableMapping[str, Any]:
                return {"type": "http.request", "body": body, "more_body": False}

            async def send(message: MutableMapping[str, Any]) -> None:
                sent.append(message)

            asyncio.run(guard(scope, receive, send))
            text = sent[1]["body"]
            self.send_response(sent[0]["status"])
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST  # noqa: N815 - the name that http.server asks for

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.send(server.server_port)
    server.serve_forever()
