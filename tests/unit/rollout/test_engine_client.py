"""The wire format of the engines: what is asked, what is accepted, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from aiohttp import web

from tests.unit.rollout.support import run, serving
from vime.errors import EngineError, GenerationError
from vime.rollout.engine_client import EngineClient, Generation, derive_seed, engine_sampling_params, parse_replies, parse_reply
from vime.utils.http_utils import HttpScope, RequestLimit, RetryPolicy
from vime.utils.types import Sample

SLIME_PARAMS = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": -1,
    "max_new_tokens": 5,
    "stop": [],
    "stop_token_ids": [],
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}
GOOD = {
    "choices": [
        {
            "finish_reason": "length",
            "token_ids": [7, 8, 9],
            "logprobs": {"content": [{"token_id": t, "logprob": -0.1 * t} for t in (7, 8, 9)]},
            "weight_versions": [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 3}],
        }
    ]
}


def changed(**fields: Any) -> dict[str, Any]:
    """GOOD with fields of its choice replaced."""
    reply = copy.deepcopy(GOOD)
    reply["choices"][0].update(fields)
    return reply


def test_tokens_log_probs_and_expanded_weight_versions_are_taken_out() -> None:
    got = parse_reply(GOOD, "router")
    assert got.token_ids == [7, 8, 9]
    assert got.log_probs == pytest.approx([-0.7, -0.8, -0.9])
    assert got.weight_versions == ["4", "4", "5"]
    assert got.status is Sample.Status.TRUNCATED


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", Sample.Status.COMPLETED), ("length", Sample.Status.TRUNCATED), ("abort", Sample.Status.ABORTED)],
)
def test_each_finish_reason_has_its_status(reason: str, status: Sample.Status) -> None:
    assert parse_reply(changed(finish_reason=reason), "router").status is status


def with_candidates(*sets: dict[int, float]) -> dict[str, Any]:
    """GOOD with the candidates of each token."""
    content = [
        {"token_id": token, "logprob": -0.5, "top_logprobs": [{"token_id": i, "logprob": value} for i, value in candidates.items()]}
        for token, candidates in zip((7, 8, 9), sets, strict=True)
    ]
    return changed(logprobs={"content": content})


CANDIDATES = with_candidates({7: -0.1, 3: -2.0, 5: -9999.0}, {8: 0.0, 1: -9999.0, 2: -9999.0}, {9: -1.0, 8: -1.0, 7: -1.0})


def test_what_was_kept_is_the_candidates_that_could_be_sampled() -> None:
    assert parse_reply(CANDIDATES, "router", kept=True).kept == [[3, 7], [8], [7, 8, 9]]
    assert parse_reply(CANDIDATES, "router").kept is None


def test_an_engines_own_sampling_mask_goes_before_the_candidates() -> None:
    reply = changed(sampling_mask=[[7, 1], [8], [2, 9]])
    assert parse_reply(reply, "router", kept=True).kept == [[1, 7], [8], [2, 9]]
    assert parse_replies(reply | {"choices": [{**reply["choices"][0], "index": 0}]}, 1, "router", kept=True)[0].kept == [
        [1, 7],
        [8],
        [2, 9],
    ]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (GOOD, "token 7 at position 0 is not among the 0 tokens it was sampled from"),
        (changed(sampling_mask=[[7], [8]]), "sampling_mask covers 2 tokens of 3"),
        (changed(sampling_mask=[[7], [8], [1]]), "token 9 at position 2 is not among the 1 tokens"),
    ],
)
def test_a_reply_that_does_not_tell_what_was_kept_is_refused(reply: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        parse_reply(reply, "router", kept=True)


def test_the_candidates_are_asked_for_when_they_are_wanted() -> None:
    assert engine_sampling_params({**SLIME_PARAMS, "top_k": 12, "kept_tokens": True})["logprobs"] == 12
    assert engine_sampling_params({**SLIME_PARAMS, "top_k": 12, "kept_tokens": False})["logprobs"] == 0
    assert "kept_tokens" not in engine_sampling_params({**SLIME_PARAMS, "kept_tokens": False})


def test_an_engine_error_is_a_generation_error() -> None:
    with pytest.raises(GenerationError, match="finish_reason 'error'"):
        parse_reply(changed(finish_reason="error"), "router")


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ({}, "without choices"),
        ({"choices": []}, "without choices"),
        ("not json", "without choices"),
        (changed(logprobs={"content": GOOD["choices"][0]["logprobs"]["content"][:2]}), "3 token_ids but 2 logprobs"),
        (changed(logprobs=None), "3 token_ids but 0 logprobs"),
        (changed(token_ids=[7, 8, 1]), "belongs to token 9"),
        (changed(weight_versions=[{"version": "4", "start": 0, "end": 2}]), "cover 2 tokens of 3"),
        (changed(weight_versions=[{"version": "4", "start": 1, "end": 3}]), "not contiguous"),
    ],
)
def test_a_torn_reply_is_an_engine_error(reply: Any, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        parse_reply(reply, "router")


def test_a_token_without_a_log_probability_is_a_generation_error() -> None:
    content = [{"token_id": 7, "logprob": -0.1}, {"token_id": 8, "logprob": -9999.0}, {"token_id": 9, "logprob": -0.1}]
    with pytest.raises(GenerationError, match="no log-probability for token 8"):
        parse_reply(changed(logprobs={"content": content}), "router")


def several(*choices: dict[str, Any]) -> dict[str, Any]:
    """A reply with GOOD's choice once for each argument, its fields replaced."""
    return {"choices": [{**GOOD["choices"][0], **fields} for fields in choices]}


def test_choices_of_one_reply_are_taken_by_their_index_each_by_itself() -> None:
    reply = several({"index": 1, "finish_reason": "error"}, {"index": 2, "finish_reason": "stop"}, {"index": 0})
    first, second, third = parse_replies(reply, 3, "router")
    assert first == parse_reply(GOOD, "router")
    assert isinstance(second, GenerationError)
    assert isinstance(third, Generation)
    assert third.status is Sample.Status.COMPLETED


@pytest.mark.parametrize("indices", [[0], [0, 0], [0, 2], [0, 1, 2]])
def test_a_reply_with_choices_missing_or_too_many_is_an_engine_error(indices: list[int]) -> None:
    with pytest.raises(EngineError, match=r"choices, numbered .* where 2 were asked for"):
        parse_replies(several(*({"index": index} for index in indices)), 2, "router")


def test_slimes_parameters_become_vllms() -> None:
    assert engine_sampling_params(SLIME_PARAMS) == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "max_tokens": 5,
        "logprobs": 0,
        "detokenize": False,
    }
    with_stop = engine_sampling_params({**SLIME_PARAMS, "stop": ["</s>"], "stop_token_ids": [3], "seed": 11})
    assert with_stop["stop"] == ["</s>"]
    assert with_stop["detokenize"] is True
    assert with_stop["stop_token_ids"] == [3]
    assert with_stop["seed"] == 11


def test_a_retry_leaves_the_session_header_out_so_that_the_router_may_choose_another_engine() -> None:
    async def attempt() -> tuple[Any, list[Any]]:
        async with serving(lambda body, n: GOOD if n else web.Response(status=502)) as server:
            scope = HttpScope(base_url=server.url, limit=RequestLimit(1), policy=RetryPolicy(retries=1, backoff=0.001))
            got = await EngineClient(scope).generate([1, 2], SLIME_PARAMS, session_id="s1")
            await scope.close()
            return got, [headers.get("x-session-id") for headers in server.headers]

    got, sessions = run(attempt())
    assert got.token_ids == [7, 8, 9]
    assert sessions == ["s1", None]


def test_a_policy_that_is_an_adapter_is_named_in_each_request() -> None:
    async def attempt() -> list[Any]:
        async with serving(lambda body, n: {"choices": [{**GOOD["choices"][0], "index": 0}]}) as server:
            scope = HttpScope(base_url=server.url, limit=RequestLimit(1))
            client = EngineClient(scope, model="policy")
            await client.generate([1, 2], SLIME_PARAMS)
            await client.generate_several([1, 2], SLIME_PARAMS, 1)
            await EngineClient(scope).generate([1, 2], SLIME_PARAMS)
            await scope.close()
            return [body.get("model") for body in server.requests]

    assert run(attempt()) == ["policy", "policy", None]


def test_seeds_depend_on_their_parts_alone() -> None:
    assert derive_seed(42, "train", 3) == 984284373  # the same on every machine: resumed runs depend on it
    seeds = {derive_seed(42, "train", index) for index in range(1000)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)
