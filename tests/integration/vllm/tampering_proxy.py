"""A real HTTP server in front of the real engine that hides some of its paths or alters some of its answers."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from vime.backends.weight_transfer.control import EngineEndpoint


@dataclass
class Proxy:
    """`absent` paths answer 404; the JSON of a path in `altered` goes through a function."""

    engine: EngineEndpoint
    url: str
    absent: set[str] = field(default_factory=set)
    altered: dict[str, Callable[[Any], Any]] = field(default_factory=dict)

    @property
    def endpoint(self) -> EngineEndpoint:
        return EngineEndpoint(name="engine 1", url=self.url, secret=self.engine.secret)


@contextmanager
def tampering_proxy(engine: EngineEndpoint) -> Iterator[Proxy]:
    """Serve until the block ends."""
    to = urlsplit(engine.url)

    class Handler(BaseHTTPRequestHandler):
        def forward(self) -> None:
            path = urlsplit(self.path).path
            if path in proxy.absent:
                return self.answer(404, b'{"detail": "Not Found"}')
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            connection = http.client.HTTPConnection(str(to.hostname), to.port, timeout=60)
            kept = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection", "content-length")}
            connection.request(self.command, self.path, body or None, kept)
            response = connection.getresponse()
            text = response.read()
            connection.close()
            if path in proxy.altered and response.status == 200:
                text = json.dumps(proxy.altered[path](json.loads(text))).encode()
            return self.answer(response.status, text)

        def answer(self, status: int, text: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = forward  # noqa: N815 - the names that http.server asks for

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy = Proxy(engine=engine, url=f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
