"""HTTP for rollout code: `post` for plug-ins, and the parts that the engine client is made of.

One policy everywhere: each try has a deadline; only a try that ran out of time, connection errors and 5xx are tried again, a
bounded number of times; a 4xx is an error at once, with the server's words. Inside a rollout, `post` uses the rollout's
session and counts against its limit of requests in flight (`HttpScope`); outside it opens a session of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from vime.errors import ConfigError, DeadlineError, EngineError

__all__ = [
    "HttpScope",
    "RequestLimit",
    "RetryPolicy",
    "current_scope",
    "get",
    "get_model_url",
    "new_session",
    "post",
    "request_json",
    "use_scope",
]

BODY_SHOWN = 2000  # characters of a server's error that a message repeats
KEEP_ALIVE = 4.0  # seconds that an idle connection is kept: less than uvicorn's 5, so that the server is not the first to hang up


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long and how often a request is tried."""

    timeout: float = 600.0  # seconds of one try, connecting included
    retries: int = 3  # further tries after a timeout, a connection error or a 5xx
    patience: float = 0.0  # seconds in which connection errors and 5xx are tried again without being counted
    backoff: float = 0.25  # seconds before the first retry; doubles each time, at most 8
    jitter: bool = True  # up to half of the wait is random, so that many clients do not return at once

    def wait(self, attempt: int) -> float:
        """Seconds to wait after try number `attempt` (from 0) failed."""
        seconds = min(self.backoff * 2.0**attempt, 8.0)
        return seconds * random.uniform(0.5, 1.0) if self.jitter else seconds


class RequestLimit(asyncio.Semaphore):
    """A semaphore that a task which holds it already may enter again: a plug-in that takes `state.semaphore` around its
    own requests cannot lock itself out."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.size = value
        self._depth: dict[asyncio.Task[Any] | None, int] = {}
        self._collecting = asyncio.Lock()

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        if task not in self._depth:
            await self.acquire()
        self._depth[task] = self._depth.get(task, 0) + 1

    async def __aexit__(self, *_: object) -> None:
        task = asyncio.current_task()
        self._depth[task] -= 1
        if not self._depth[task]:
            del self._depth[task]
            self.release()

    @property
    def held_here(self) -> bool:
        """Whether the current task holds it."""
        return asyncio.current_task() in self._depth

    @contextlib.asynccontextmanager
    async def several(self, count: int) -> AsyncIterator[None]:
        """Hold `count` slots, `size` at most. One task at a time collects them, so that two halves never wait for each other."""
        taken = 0
        try:
            async with self._collecting:
                while taken < min(count, self.size):
                    await self.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self.release()


@dataclass(slots=True, kw_only=True)
class HttpScope:
    """One session, and a limit on requests in flight to one server. Belongs to one event loop."""

    base_url: str  # requests to this server are limited; others are not
    limit: RequestLimit
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    session: aiohttp.ClientSession | None = None
    lent: aiohttp.ClientSession | None = None  # somebody else's, who will close it; goes before a session of our own
    stopped: bool = False  # no further request shall be sent to generate: what is unfinished is to be continued later

    def open(self) -> aiohttp.ClientSession:
        """The session; made at the first call, which must come from the event loop that will use it."""
        if self.lent is not None and not self.lent.closed:
            return self.lent
        if self.session is None or self.session.closed:
            self.session = new_session()
        return self.session

    async def close(self) -> None:
        """Close the session and its connections, unless it is lent."""
        self.lent = None
        if self.session is not None:
            await self.session.close()
            self.session = None

    def slot(self, url: str, count: int = 1) -> contextlib.AbstractAsyncContextManager[Any]:
        """Hold this while a request to `url` that makes the server generate `count` sequences is in flight."""
        if _origin(url) != _origin(self.base_url):
            return contextlib.nullcontext()
        return self.limit if count == 1 else self.limit.several(count)


def new_session() -> aiohttp.ClientSession:
    """A session of the running event loop. What bounds its connections is the limit of requests in flight (`RequestLimit`)."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300, keepalive_timeout=KEEP_ALIVE))


_SCOPE: ContextVar[HttpScope | None] = ContextVar("vime_http_scope", default=None)


def current_scope() -> HttpScope | None:
    """The scope of the rollout that runs in this task, if any."""
    return _SCOPE.get()


@contextlib.contextmanager
def use_scope(scope: HttpScope) -> Iterator[HttpScope]:
    """Make `scope` the one that `post` uses in this task and the tasks it starts."""
    token = _SCOPE.set(scope)
    try:
        yield scope
    finally:
        _SCOPE.reset(token)


def get_model_url(args: Any, name: str, path: str = "/inference/v1/generate") -> str:
    """Where a model of --vllm-config is asked: the address of its router, and `path`. ConfigError for a name that the run has not."""
    routers = args.vllm_model_routers or {}
    if name not in routers:
        raise ConfigError(f"no model '{name}' is served: this run has {', '.join(routers) or 'no engines'}. Name it in --vllm-config.")
    host, port = routers[name]
    return f"http://{host}:{port}{path}"


async def post(
    url: str,
    payload: Any,
    max_retries: int | None = None,
    headers: dict[str, str] | None = None,
    *,
    timeout: float | None = None,
) -> Any:
    """POST `payload` as JSON; returns the reply's JSON, or its text when it is not JSON.

    Args:
        url: where to.
        payload: anything `json.dumps` takes.
        max_retries: further tries after a timeout, a connection error or a 5xx; default: the rollout's `--rollout-request-retries`.
        headers: added to the request.
        timeout: seconds of one try; default: the rollout's `--rollout-request-timeout`.

    Raises:
        EngineError: a 4xx (at once), or the last 5xx or connection error when the tries are used up.
        DeadlineError: the last try, too, took longer than `timeout`.
    """
    async with _client(url) as (scope, session):
        policy = _policy(scope, max_retries, timeout)
        return await request_json(session, "POST", url, payload, policy=policy, headers=headers, strict=False)


async def get(url: str, max_retries: int | None = None, *, timeout: float | None = None) -> Any:
    """GET `url`; returns the reply's JSON, or its text when it is not JSON. Errors as `post`."""
    async with _client(url, limited=False) as (scope, session):
        return await request_json(session, "GET", url, None, policy=_policy(scope, max_retries, timeout), strict=False)


def _policy(scope: HttpScope | None, retries: int | None, timeout: float | None) -> RetryPolicy:
    base = scope.policy if scope is not None else RetryPolicy()
    return RetryPolicy(
        timeout=base.timeout if timeout is None else timeout,
        retries=base.retries if retries is None else retries,
        backoff=base.backoff,
        jitter=base.jitter,
        patience=base.patience if retries is None else 0.0,
    )


@contextlib.asynccontextmanager
async def _client(url: str, limited: bool = True) -> AsyncIterator[tuple[HttpScope | None, aiohttp.ClientSession]]:
    scope = current_scope()
    if scope is None:
        async with aiohttp.ClientSession() as session:
            yield None, session
        return
    async with scope.slot(url) if limited else contextlib.nullcontext():
        yield scope, scope.open()


async def request_json(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    payload: Any,
    *,
    policy: RetryPolicy,
    headers: dict[str, str] | None = None,
    first_try_headers: dict[str, str] | None = None,
    strict: bool = True,
) -> Any:
    """One request under `policy`; returns the decoded JSON.

    Args:
        first_try_headers: sent with the first try only (e.g. an affinity header: a retry shall reach another engine).
        strict: a reply that is no JSON is an error; else its text is returned.

    Raises:
        EngineError, DeadlineError: as `post`.
    """
    body = None if payload is None else json.dumps(payload).encode()
    sent = {**({"Content-Type": "application/json"} if body is not None else {}), **(headers or {})}
    earlier, last, timed_out, counted = "none", "none", False, 0
    begun = time.monotonic()
    for attempt in itertools.count():
        extra = first_try_headers if attempt == 0 and first_try_headers else {}
        try:
            status, text = await _send(session, method, url, body, {**sent, **extra}, policy.timeout)
        except TimeoutError:  # before connection errors: aiohttp has kinds that are both
            earlier, last, timed_out = last, f"no reply within {policy.timeout:g} s", True
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
            earlier, last, timed_out = last, f"{type(error).__name__}: {error}", False
        else:
            if status < 400:
                return _decode(text, url, strict)
            earlier, last, timed_out = last, f"HTTP {status}: {text[:BODY_SHOWN]}", False
            if status < 500:
                raise EngineError(f"{method} {url} was refused with HTTP {status}: {text[:BODY_SHOWN]}. The request itself is at fault.")
        if timed_out or time.monotonic() - begun >= policy.patience:
            if counted == policy.retries:
                break
            counted += 1
        await asyncio.sleep(policy.wait(attempt))
    if timed_out:
        raise DeadlineError(
            peer=url,
            phase=f"{method} ({attempt + 1} tries in {time.monotonic() - begun:.4g} s, the last without a reply)",
            seconds=policy.timeout,
            progress=f"the try before it: {earlier}",
            cure="Is the server, or an engine behind it, overloaded or stuck? Their logs say; or raise --rollout-request-timeout.",
        )
    raise EngineError(
        f"{method} {url} failed {attempt + 1} times; the last failure: {last}. "
        "Look at the log of the router and of the engines behind it; --rollout-request-retries allows more tries."
    )


async def _send(
    session: aiohttp.ClientSession, method: str, url: str, body: bytes | None, headers: dict[str, str], timeout: float
) -> tuple[int, str]:
    limit = aiohttp.ClientTimeout(total=timeout)
    async with session.request(method, url, data=body, headers=headers, timeout=limit) as reply:
        return reply.status, await reply.text()


def _decode(text: str, url: str, strict: bool) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if not strict:
            return text
        raise EngineError(f"{url} answered 200 with {len(text)} characters that are no JSON ({error}): {text[:200]!r}.") from error


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
