"""The request policy: retries on timeouts, connection errors and 5xx only, deadlines, errors that repeat the server's words."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from tests.unit.rollout.support import run, serving
from vime.errors import ConfigError, DeadlineError, EngineError
from vime.utils.http_utils import HttpScope, RequestLimit, RetryPolicy, get, get_model_url, post, use_scope

QUICK = RetryPolicy(timeout=5.0, retries=3, backoff=0.001)


async def post_with(answer: Any, policy: RetryPolicy = QUICK, **kwargs: Any) -> tuple[Any, int]:
    """What `post` gives or raises, and how many requests the server saw."""
    async with serving(answer) as server:
        scope = HttpScope(base_url=server.url, limit=RequestLimit(4), policy=policy)
        with use_scope(scope):
            try:
                result = await post(server.url + "/x", {"a": 1}, **kwargs)
            except (EngineError, DeadlineError) as error:
                result = error
            finally:
                await scope.close()
        return result, len(server.requests)


def test_a_json_reply_is_decoded_and_other_text_is_returned_as_it_is() -> None:
    assert run(post_with(lambda body, n: {"echo": body}))[0] == {"echo": {"a": 1}}
    assert run(post_with(lambda body, n: web.Response(text="plain")))[0] == "plain"


def test_a_5xx_is_tried_again_until_it_succeeds() -> None:
    result, count = run(post_with(lambda body, n: web.Response(status=503, text="no worker") if n < 2 else {"ok": True}))
    assert result == {"ok": True}
    assert count == 3


def test_a_5xx_that_stays_is_an_error_with_the_servers_words_after_the_bounded_tries() -> None:
    result, count = run(post_with(lambda body, n: web.Response(status=500, text="engine core died")))
    assert isinstance(result, EngineError)
    assert "engine core died" in str(result)
    assert count == QUICK.retries + 1


def test_with_patience_errors_of_the_server_are_not_counted_and_timeouts_are() -> None:
    patient = RetryPolicy(timeout=5.0, retries=1, backoff=0.001, patience=60.0)
    result, count = run(post_with(lambda body, n: web.Response(status=503, text="no worker") if n < 9 else {"ok": True}, patient))
    assert result == {"ok": True}
    assert count == 10
    hasty = RetryPolicy(timeout=0.05, retries=1, backoff=0.001, patience=60.0)
    result, count = run(post_with(lambda body, n: asyncio.sleep(5.0), hasty))
    assert isinstance(result, DeadlineError)
    assert count == 2


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_4xx_is_an_error_at_once_with_the_body(status: int) -> None:
    result, count = run(post_with(lambda body, n: web.Response(status=status, text="max_tokens is too large")))
    assert isinstance(result, EngineError)
    assert f"HTTP {status}" in str(result)
    assert "max_tokens is too large" in str(result)
    assert count == 1


def test_a_reply_that_breaks_off_is_tried_again() -> None:
    def answer(body: Any, n: int) -> Any:
        return {"ok": True} if n else torn()

    async def torn() -> web.StreamResponse:
        return TornResponse(headers={"Content-Length": "1000"})

    class TornResponse(web.StreamResponse):
        async def write_eof(self, data: bytes = b"") -> None:
            await self.write(b'{"half": ')
            assert self._req is not None
            assert self._req.transport is not None
            self._req.transport.close()

    result, count = run(post_with(answer))
    assert result == {"ok": True}
    assert count == 2


def test_a_server_that_is_not_there_is_an_error_after_the_tries() -> None:
    async def attempt() -> None:
        async with serving(lambda body, n: {}) as server:
            url = server.url
        await post(url, {}, max_retries=1)

    with pytest.raises(EngineError, match="failed 2 times"):
        run(attempt())


async def never() -> dict[str, Any]:
    """No answer."""
    await asyncio.Event().wait()
    return {}


def test_a_try_without_a_reply_is_followed_by_another() -> None:
    result, count = run(post_with(lambda body, n: never() if n == 0 else {"b": 2}, timeout=2.0))
    assert result == {"b": 2}
    assert count == 2


def test_tries_that_all_stay_without_a_reply_end_in_a_deadline_error_that_names_server_tries_and_seconds() -> None:
    result, count = run(post_with(lambda body, n: never(), timeout=0.05, max_retries=2))
    assert isinstance(result, DeadlineError)
    assert "127.0.0.1" in str(result)
    assert re.search(r"3 tries in \d", str(result))
    assert "0.05 s" in str(result)
    assert count == 3


def test_what_the_last_try_met_decides_the_kind_of_error() -> None:
    result, _ = run(post_with(lambda body, n: web.Response(status=503) if n else never(), timeout=2.0, max_retries=1))
    assert isinstance(result, EngineError)
    result, _ = run(post_with(lambda body, n: never() if n else web.Response(status=503, text="busy"), timeout=2.0, max_retries=1))
    assert isinstance(result, DeadlineError)
    assert "the try before it: HTTP 503: busy" in str(result)


def test_requests_to_the_router_hold_a_slot_and_others_do_not() -> None:
    async def counted(limit: int, requests: int, same_server: bool) -> int:
        gate = asyncio.Event()

        async def answer() -> dict[str, Any]:
            if server.in_flight >= (limit if same_server else requests):
                gate.set()
            await gate.wait()
            return {}

        async with serving(lambda body, n: answer()) as server:
            base = server.url if same_server else "http://127.0.0.1:1"
            scope = HttpScope(base_url=base, limit=RequestLimit(limit), policy=QUICK)
            with use_scope(scope):
                await asyncio.gather(*(post(server.url, {}) for _ in range(requests)))
            await scope.close()
            return server.most_in_flight

    assert run(counted(2, 6, same_server=True)) == 2
    assert run(counted(2, 6, same_server=False)) == 6


def test_a_plug_in_that_holds_a_slot_itself_is_not_locked_out() -> None:
    async def one(scope: HttpScope, url: str) -> Any:
        async with scope.limit:
            return await post(url, {})

    async def attempt() -> tuple[list[Any], int]:
        async with serving(lambda body, n: n) as server:
            scope = HttpScope(base_url=server.url, limit=RequestLimit(2), policy=QUICK)
            with use_scope(scope):
                replies = await asyncio.gather(*(one(scope, server.url) for _ in range(6)))
            await scope.close()
            return sorted(replies), server.most_in_flight

    replies, most = run(attempt())
    assert replies == list(range(6))
    assert most <= 2


def test_takers_of_several_slots_do_not_lock_each_other_out_and_never_exceed_the_limit() -> None:
    async def attempt() -> int:
        limit = RequestLimit(5)
        held = most = 0

        async def taker() -> None:
            nonlocal held, most
            async with limit.several(3):
                held += 3
                most = max(most, held)
                await asyncio.sleep(0)
                held -= 3

        async def single() -> None:
            nonlocal held, most
            async with limit:
                held += 1
                most = max(most, held)
                await asyncio.sleep(0)
                held -= 1

        await asyncio.gather(*(work() for _ in range(10) for work in (taker, single)))
        assert not limit.locked()
        return most

    assert 3 < run(attempt()) <= 5


def test_a_taker_of_several_slots_that_is_cancelled_gives_them_back() -> None:
    async def attempt() -> int:
        limit = RequestLimit(3)
        async with limit:
            waiting = asyncio.create_task(limit.several(3).__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        return limit._value

    assert run(attempt()) == 3


def test_a_models_url_is_that_of_its_router_and_other_names_are_refused() -> None:
    args = SimpleNamespace(vllm_model_routers={"policy": ("127.0.0.1", 8100), "judge": ("127.0.0.1", 8101)})
    assert get_model_url(args, "judge") == "http://127.0.0.1:8101/inference/v1/generate"
    assert get_model_url(args, "policy", "/v1/chat/completions") == "http://127.0.0.1:8100/v1/chat/completions"
    with pytest.raises(ConfigError, match="no model 'jugde' is served: this run has policy, judge"):
        get_model_url(args, "jugde")


def test_get_reads_json() -> None:
    async def attempt() -> Any:
        async with serving(lambda body, n: {"workers": []}) as server:
            return await get(server.url + "/workers")

    assert run(attempt()) == {"workers": []}
