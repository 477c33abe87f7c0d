"""Client of one engine's control endpoints: pause, weight update, caches, sleep. Synchronous, over plain http.client.

Control calls go to the engine itself, never through the router, and carry the secret that the engine was started with.
A call that may safely be repeated is repeated after a connection error or a 5xx; the steps of a weight update are not.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from vime.errors import DeadlineError, EngineError

__all__ = ["SECRET_HEADER", "EngineControl", "EngineEndpoint"]

SECRET_HEADER = "x-vime-control"  # carries the secret; vllm-router does not forward it

_RETRIES = 3  # further tries of a repeatable call
_HEALTH_INTERVAL = 0.2  # seconds between looks at an engine that is awaited
_BACKOFF = 0.1  # seconds before the first of them; doubles


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEndpoint:
    """Where an engine is reached, and the secret of its control paths. Example: name="engine 0", url="http://127.0.0.1:8101"."""

    name: str
    url: str
    secret: str

    def __repr__(self) -> str:
        return f"EngineEndpoint({self.name}, {self.url})"  # without the secret: representations end up in logs


class EngineControl:
    """One engine. Every call takes a deadline in seconds and raises DeadlineError, or EngineError with the engine's answer."""

    def __init__(self, url: str, secret: str, *, name: str = "engine", seconds: float = 60.0) -> None:
        """`url` like http://127.0.0.1:8101; `seconds` is the deadline of calls that are given none."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise ValueError(f"engine url '{url}': expected http://HOST:PORT")
        self.name, self.url = name, url
        self._host, self._port, self._secret, self._seconds = parts.hostname, parts.port, secret, seconds

    @classmethod
    def of(cls, endpoint: EngineEndpoint, *, seconds: float = 60.0) -> EngineControl:
        """The client of an endpoint."""
        return cls(endpoint.url, endpoint.secret, name=endpoint.name, seconds=seconds)

    def healthy(self, seconds: float = 2.0) -> bool:
        """True when the engine answers /health with 200 within `seconds`; never raises for an engine that is not up."""
        try:
            status, _ = self._once("GET", "/health", None, seconds)
        except (OSError, http.client.HTTPException):
            return False
        return status == 200

    def wait_healthy(self, seconds: float, stop: threading.Event) -> bool:
        """Whether the engine is up within `seconds`; `stop` ends the wait."""
        deadline = time.monotonic() + seconds
        while not self.healthy():
            if time.monotonic() > deadline or stop.wait(_HEALTH_INTERVAL):
                return False
        return True

    def serves(self, path: str, seconds: float | None = None) -> bool:
        """Whether the engine has this path; asked with GET, which answers 405 where only POST does something.

        EngineError when the engine cannot be reached or the secret is not its own.
        """
        limit = self._seconds if seconds is None else seconds
        try:
            status, text = self._once("GET", path, None, limit)
        except TimeoutError as error:
            raise DeadlineError(peer=f"{self.name} at {self.url}", phase=path, seconds=limit, cure="Look at its log.") from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{self.name} at {self.url} cannot be reached: {error!r}.") from error
        if status in (401, 403):
            raise EngineError(f"{self.name} at {self.url}, GET {path}: answered {status}: {_message(text)}")
        return status != 404

    def pause(self, mode: str = "keep", seconds: float | None = None) -> None:
        """Stop scheduling. mode: keep (requests go on after resume), wait (finish them first), abort (return what they have)."""
        self.call("POST", "/pause", query={"mode": mode}, seconds=seconds)

    def resume(self, seconds: float | None = None) -> None:
        """Schedule again."""
        self.call("POST", "/resume", seconds=seconds)

    def is_paused(self, seconds: float | None = None) -> bool:
        """Whether the engine is paused; its core is asked."""
        return bool(self.call("GET", "/is_paused", seconds=seconds)["is_paused"])

    def reset_prefix_cache(self, seconds: float | None = None) -> None:
        """Forget all cached keys and values, those of running requests included (they are computed anew)."""
        answer = self.call("POST", "/reset_prefix_cache", query={"reset_running_requests": "true"}, seconds=seconds)
        if not answer.get("success"):
            raise EngineError(f"{self.name} could not reset its prefix cache: it would mix keys and values of two weight versions.")

    def init_weight_update(self, info: dict[str, Any], seconds: float | None = None) -> None:
        """Set the weight transport up; once per engine."""
        self.call("POST", "/init_weight_transfer_engine", {"init_info": info}, seconds=seconds, repeat=False)

    def start_weight_update(self, seconds: float | None = None) -> None:
        """Open a weight update."""
        self.call("POST", "/start_weight_update", seconds=seconds, repeat=False)

    def update_weights(self, info: dict[str, Any], seconds: float | None = None) -> None:
        """Load one bucket."""
        self.call("POST", "/update_weights", {"update_info": info}, seconds=seconds, repeat=False)

    def finish_weight_update(self, version: str | None, seconds: float | None = None) -> None:
        """Close a weight update; with a version, tokens sampled from now on carry it."""
        body = None if version is None else {"weight_version": version}
        self.call("POST", "/finish_weight_update", body, seconds=seconds, repeat=False)

    def load_adapter(self, name: str, folder: str, seconds: float | None = None) -> None:
        """Load the PEFT folder as the adapter `name`, after one that has that name is unloaded.

        vLLM's own replacement in place would read the folder again for each batch. Requests that are in flight keep the old one, so
        there must be none.
        """
        if name in self.models(seconds):
            self.call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, seconds=seconds, repeat=False)
        self.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, seconds=seconds, repeat=False)

    def models(self, seconds: float | None = None) -> set[str]:
        """The names that the engine answers to, adapters included."""
        return {str(model["id"]) for model in self.call("GET", "/v1/models", seconds=seconds)["data"]}

    def set_weight_version(self, version: str, seconds: float | None = None) -> None:
        """Tokens sampled from now on carry this version."""
        self.call("POST", "/update_weight_version", {"new_version": version}, seconds=seconds)

    def weight_version(self) -> str:
        """The version of the last finished update; "default" before the first."""
        return str(self.call("GET", "/weight_info")["weight_version"])

    def received_weights(self, seconds: float | None = None) -> list[dict[str, Any]]:
        """Per worker: {"tensors": {name: [dtype, shape, digest]}, "unloaded": [parameters that no tensor was loaded into]}."""
        answer = self.call("POST", "/collective_rpc", {"method": "vime_received_weights"}, seconds=seconds)
        return list(answer["results"])

    def sleep(self, level: int = 1, seconds: float | None = None) -> None:
        """Free device memory. level 1 keeps the weights in host memory, 2 drops them. Needs --enable-sleep-mode."""
        self.call("POST", "/sleep", query={"level": str(level)}, seconds=seconds)

    def wake_up(self, tags: tuple[str, ...] = (), seconds: float | None = None) -> None:
        """Take device memory back: all of it, or the tags named ("weights", "kv_cache")."""
        self.call("POST", "/wake_up", query=[("tags", tag) for tag in tags], seconds=seconds)

    def abort(self, request_ids: tuple[str, ...] = (), seconds: float | None = None) -> int:
        """End these requests, or all when none are named; they return what they have. Returns how many."""
        answer = self.call("POST", "/abort_requests", {"request_ids": list(request_ids)}, seconds=seconds)
        return int(answer.get("aborted", 0))

    def metric(self, name: str, seconds: float = 5.0) -> float:
        """One of the engine's Prometheus metrics, summed over its labels; 0 when there is none. Example: "vllm:num_requests_running"."""
        try:
            status, text = self._once("GET", "/metrics", None, seconds)
        except TimeoutError as error:
            raise DeadlineError(peer=f"{self.name} at {self.url}", phase="/metrics", seconds=seconds) from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{self.name} at {self.url} cannot be reached for its metrics: {error!r}.") from error
        if status != 200:
            raise EngineError(f"{self.name} at {self.url}, GET /metrics: answered {status}.")
        lines = [line for line in text.decode().splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def prompt_log_probs(self, tokens: list[int], seconds: float | None = None, model: str | None = None) -> tuple[list[float], str]:
        """Natural log-probability of tokens[1:], each given its prefix [len - 1], and the weight version they belong to.

        `model`: an adapter by its name; None: the engine's own model.
        """
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": tokens, "sampling_params": params} | ({} if model is None else {"model": model})
        answer = self.call("POST", "/inference/v1/generate", body, seconds=seconds)
        rows = answer.get("prompt_logprobs") or []
        if len(rows) != len(tokens):
            raise EngineError(f"{self.name} returned {len(rows)} prompt log-probs for {len(tokens)} tokens.")
        values = [float(row[str(token)]["logprob"]) for token, row in zip(tokens[1:], rows[1:], strict=True)]
        spans = answer["choices"][0].get("weight_versions") or []
        return values, str(spans[-1]["version"]) if spans else ""

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        query: dict[str, str] | list[tuple[str, str]] | None = None,
        seconds: float | None = None,
        repeat: bool = True,
    ) -> dict[str, Any]:
        """One request; the decoded JSON object (empty when the engine sends none)."""
        limit = self._seconds if seconds is None else seconds
        deadline = time.monotonic() + limit
        target = f"{path}?{urlencode(query)}" if query else path
        for attempt in range(1 + (_RETRIES if repeat else 0)):
            if attempt:
                time.sleep(min(_BACKOFF * 2 ** (attempt - 1), max(0.0, deadline - time.monotonic())))  # back off, bounded
            remaining = deadline - time.monotonic()
            try:
                if remaining <= 0:
                    raise TimeoutError
                status, text = self._once(method, target, body, remaining)
                failure = f"answered {status}: {_message(text)}"
            except TimeoutError as error:
                raise DeadlineError(peer=f"{self.name} at {self.url}", phase=path, seconds=limit, cure="Look at its log.") from error
            except (OSError, http.client.HTTPException) as error:
                status, text, failure = 0, b"", f"cannot be reached: {error!r}"
            if 200 <= status < 300:
                return _decoded(text)
            if 400 <= status < 500:
                break
        raise EngineError(f"{self.name} at {self.url}, {method} {path}: {failure.rstrip('.')}.")

    def _once(self, method: str, target: str, body: dict[str, Any] | None, seconds: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=seconds)
        headers = {SECRET_HEADER: self._secret, "content-type": "application/json"}
        try:
            connection.request(method, target, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def _decoded(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {"value": value}


def _message(text: bytes) -> str:
    """The human part of an error answer, at most 500 characters."""
    try:
        error = json.loads(text).get("error")
        found = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        found = None
    return " ".join(str(found or text.decode("utf-8", "replace")).split())[:500]
