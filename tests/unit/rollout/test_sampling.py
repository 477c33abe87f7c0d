"""One request for a group gives what a request a member gives, and is sent only where it may be."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from tests.unit.rollout.plugins import HERE
from tests.unit.rollout.support import make_args, reply_of, run, serving
from vime.errors import GenerationError
from vime.packing.routing import encoded, joined
from vime.rollout import generation
from vime.rollout.generation import generate_and_rm_group
from vime.rollout.sampling import GROUPS_PER_ENGINE, MOST_TOKENS, shares_request
from vime.rollout.vllm_rollout import GenerateState, generate
from vime.utils.types import Sample

Status = Sample.Status
FLAGS = {"rm_type": "exact", "rollout_max_response_len": 16, "rollout_request_retries": 1}


def group_of(count: int = 4, **fields: Any) -> list[Any]:
    """Pending samples of group 0."""
    return [Sample(group_index=0, index=index, prompt="2+2=", label="4", **copy.deepcopy(fields)) for index in range(count)]


def generated(model_dir: Path, answer: Any, group: list[Any] | None = None, **flags: Any) -> tuple[list[Any], Any]:
    """The group as `generate_and_rm_group` leaves it, and the server."""

    async def work() -> tuple[list[Any], Any]:
        async with serving(answer) as server:
            args = make_args(server.runtime, hf_checkpoint=str(model_dir), **(FLAGS | flags))
            async with GenerateState(args).running() as state:
                return await generate_and_rm_group(args, group or group_of(), dict(state.sampling_params)), server

    return run(work())


def sizes(server: Any) -> list[int]:
    """How many choices each request asked for."""
    return [request["sampling_params"].get("n", 1) for request in server.requests]


def by_number(tokenizer: Any) -> Any:
    """Answers that differ in text, length, version and reason to end; the engine fails the third once it is asked alone."""

    def answer(body: dict[str, Any], n: int) -> Any:
        texts = ["4", "44", "5 x", "4"]
        reply = reply_of(texts[n % 4], tokenizer, reason="length" if n % 4 == 1 else "stop", version=str(n % 4))
        if n % 4 == 2:
            reply["choices"][0]["logprobs"]["content"][1]["logprob"] = -9999.0  # vLLM's word for "not known"
        return reply

    return answer


def test_a_groups_one_request_equals_a_request_a_member_in_every_field(
    model_dir: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, one = generated(model_dir, by_number(tokenizer))
    monkeypatch.setattr(generation, "shares_request", lambda *_: False)
    apart, many = generated(model_dir, by_number(tokenizer), vllm_server_concurrency=1)  # one at a time: answers come in order
    assert (sizes(one), sizes(many)) == ([4], [1, 1, 1, 1])
    for sample in [*together, *apart]:  # the port of the server is part of the message
        if "failure" in sample.metadata:
            sample.metadata["failure"] = sample.metadata["failure"].partition(" has no ")[2]
    assert together == apart
    assert [sample.status for sample in together] == [Status.COMPLETED, Status.TRUNCATED, Status.FAILED, Status.COMPLETED]
    assert [sample.reward for sample in together] == [1.0, 0.0, None, 1.0]
    assert [sample.weight_versions for sample in together] == [["0", "0"], ["1", "1"], [], ["3", "3"]]
    assert [sample.session_id for sample in together] == ["42-0-0", "42-0-1", "42-0-2", "42-0-3"]


def test_members_do_not_share_tokens(model_dir: Path, tokenizer: Any) -> None:
    group, _ = generated(
        model_dir, lambda body, n: web.Response(status=400) if "n" in body["sampling_params"] else reply_of("4", tokenizer)
    )
    assert len({id(sample.tokens) for sample in group}) == 4


def test_a_refused_group_is_asked_for_one_by_one_without_more_tries(model_dir: Path, tokenizer: Any) -> None:
    def answer(body: dict[str, Any], n: int) -> Any:
        many = "n" in body["sampling_params"]
        return web.Response(status=400, text="n must be at most max_num_seqs") if many else reply_of("4", tokenizer)

    group, server = generated(model_dir, answer)
    assert sizes(server) == [4, 1, 1, 1, 1]
    assert [sample.reward for sample in group] == [1.0] * 4


def test_a_group_whose_engine_dies_is_tried_again_whole(model_dir: Path, tokenizer: Any) -> None:
    group, server = generated(model_dir, lambda body, n: web.Response(status=502) if n < 4 else reply_of("4", tokenizer))
    assert sizes(server) == [4, 4]
    assert [sample.status for sample in group] == [Status.COMPLETED] * 4


def test_a_member_on_which_the_engine_always_breaks_costs_the_others_nothing(model_dir: Path, tokenizer: Any) -> None:
    singles: list[int] = []

    def answer(body: dict[str, Any], n: int) -> Any:
        if "n" not in body["sampling_params"]:
            singles.append(n)
        return web.Response(status=500, text="it broke") if not singles or len(singles) in (1, 5) else reply_of("4", tokenizer)

    group, server = generated(model_dir, answer)
    assert sizes(server) == [4, 4, 1, 1, 1, 1, 1]
    assert sorted(sample.status.value for sample in group) == ["completed", "completed", "completed", "failed"]
    assert "it broke" in next(sample for sample in group if sample.status is Status.FAILED).metadata["failure"]


def test_members_that_the_engine_cut_off_are_continued_each_by_itself(model_dir: Path, tokenizer: Any) -> None:
    def answer(body: dict[str, Any], n: int) -> Any:
        return reply_of("ab", tokenizer, reason="abort", version="1") if n in (1, 3) else reply_of("c", tokenizer, version="2")

    group, server = generated(model_dir, answer)
    assert sizes(server) == [4, 1, 1]
    assert [sample.response for sample in group] == ["c<|im_end|>", "abc<|im_end|>"] * 2
    assert group[1].weight_versions == ["1", "1", "2", "2"]
    assert {request["sampling_params"]["max_tokens"] for request in server.requests[1:]} == {16 - 2}


def test_a_member_that_is_cut_off_again_and_again_fails_after_as_many_tries_as_alone(model_dir: Path, tokenizer: Any) -> None:
    def answer(body: dict[str, Any], n: int) -> Any:
        return reply_of("a", tokenizer, reason="abort" if n == 0 or n > 3 else "stop")

    group, server = generated(model_dir, answer)
    assert sizes(server) == [4, 1]
    assert [sample.status for sample in group] == [Status.FAILED, Status.COMPLETED, Status.COMPLETED, Status.COMPLETED]
    assert "cut off by the engine" in group[0].metadata["failure"]


def test_a_group_request_that_takes_too_long_fails_all_members_with_the_cause(model_dir: Path) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(GenerationError, match=r"none of the 4 samples of group 0 could be had: DeadlineError.*--rollout-request-timeout"):
        generated(model_dir, lambda body, n: never(), rollout_request_timeout=0.05)


def test_a_judge_that_fails_for_one_member_fails_that_member(model_dir: Path, tokenizer: Any) -> None:
    group, server = generated(model_dir, lambda body, n: reply_of("4", tokenizer), custom_rm_path=f"{HERE}.judge_down_for_odd")
    assert sizes(server) == [4]
    assert [sample.reward for sample in group] == [1.0, None, 1.0, None]
    assert group[1].metadata["failure"] == "GenerationError: the judge is down"


def test_a_group_holds_as_many_slots_as_it_has_members(model_dir: Path, tokenizer: Any) -> None:
    async def work() -> int:
        async def answer() -> Any:
            await asyncio.sleep(0)
            return reply_of("4", tokenizer)

        async with serving(lambda body, n: answer()) as server:
            args = make_args(server.runtime, hf_checkpoint=str(model_dir), vllm_server_concurrency=7, **FLAGS)
            async with GenerateState(args).running() as state:
                groups = [group_of(3) for _ in range(9)]
                await asyncio.gather(*(generate_and_rm_group(args, group, dict(state.sampling_params)) for group in groups))
            assert sizes(server) == [3] * 9
            return server.most_in_flight

    assert run(work()) <= 2  # 2 * 3 of 7 slots


@pytest.mark.parametrize(
    ("why", "flags", "change", "params"),
    [
        ("seeds are a sample's own", {"vllm_enable_deterministic_inference": True}, {}, {}),
        ("seeds are a sample's own", {}, {}, {"seed": 3}),
        ("vLLM refuses n > 1 for greedy sampling", {}, {}, {"temperature": 0.0}),
        ("the user's function generates", {"custom_generate_function_path": f"{HERE}.two_turns"}, {}, {}),
        ("the user's function generates", {}, {"generate_function_path": f"{HERE}.two_turns"}, {}),
        ("a session of the user's own", {}, {"session_id": "mine"}, {}),
        ("another prompt", {}, {"prompt": "3+3="}, {}),
        ("another prompt", {}, {"metadata": {"tools": [{"name": "calculator"}]}}, {}),
        ("begun already", {}, {"tokens": [5, 6], "response_length": 1, "status": Status.ABORTED}, {}),
        ("finished already", {}, {"status": Status.COMPLETED, "reward": 1.0}, {}),
        ("a long reply", {}, {}, {"max_new_tokens": MOST_TOKENS // 4 + 1}),
        ("more members than slots", {"vllm_server_concurrency": 3}, {}, {}),
    ],
)
def test_one_request_is_not_sent_where_it_would_not_be_the_same(
    model_dir: Path, why: str, flags: dict[str, Any], change: dict[str, Any], params: dict[str, Any]
) -> None:
    args = make_args({"vllm_router_ip": "127.0.0.1", "vllm_router_port": 1}, hf_checkpoint=str(model_dir), **(FLAGS | flags))
    state = GenerateState(args)

    async def asked(members: list[Any]) -> bool:
        return shares_request(members, state, {**state.sampling_params, **params})

    plain = group_of()
    assert run(asked(plain)) is (not flags and not params)
    for name, value in change.items():
        setattr(plain[2], name, value)
    assert run(asked(plain)) is False, why
    assert run(asked([plain[0], [plain[1]], plain[2], plain[3]])) is False


def test_few_groups_are_spread_over_several_engines_by_sample(model_dir: Path) -> None:
    async def asked(groups: int) -> bool:
        runtime = {"vllm_router_ip": "127.0.0.1", "vllm_router_port": 1, "num_engines": 2}
        state = GenerateState(make_args(runtime, hf_checkpoint=str(model_dir), rollout_batch_size=groups, **FLAGS))
        return shares_request(group_of(), state, state.sampling_params)

    assert not run(asked(2 * GROUPS_PER_ENGINE - 1))
    assert run(asked(2 * GROUPS_PER_ENGINE))


def tells_routing(tokenizer: Any) -> Any:
    """Answers with vLLM's routed_experts: a token's experts are its place in the sequence and the one behind."""

    def answer(body: dict[str, Any], n: int) -> Any:
        reply = reply_of(["4", "four"][n % 2], tokenizer)
        skipped = body["sampling_params"].get("routed_experts_prompt_start", 0)
        places = np.arange(skipped, len(body["token_ids"]) + len(reply["choices"][0]["token_ids"]) - 1)
        reply["choices"][0]["routed_experts"] = encoded(np.stack([places, places + 1], -1)[:, None].astype(np.uint8))
        return reply

    return answer


async def two_turns(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    await generate(args, sample, dict(sampling_params))
    sample.append_response_tokens(tokens=[5, 6, 7], trainable=False, text="tool")
    return await generate(args, sample, dict(sampling_params))


def test_routing_is_asked_for_once_a_token_and_goes_on_over_turns(model_dir: Path, tokenizer: Any) -> None:
    flags = {"use_rollout_routing_replay": True, "custom_generate_function_path": f"{__name__}.two_turns"}
    (sample,), server = generated(model_dir, tells_routing(tokenizer), group_of(1), **flags)
    first, second = (request["sampling_params"] for request in server.requests)
    assert "routed_experts" not in first
    assert "routed_experts_prompt_start" not in first
    assert second["routed_experts_prompt_start"] == len(server.requests[0]["token_ids"]) + len("4")
    routing = joined(sample.rollout_routed_experts)
    assert routing[:, 0].tolist() == [[place, place + 1] for place in range(len(sample.tokens) - 1)]
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample


def test_a_group_is_asked_for_member_by_member_where_each_reply_tells_its_routing(model_dir: Path, tokenizer: Any) -> None:
    group, server = generated(model_dir, tells_routing(tokenizer), use_rollout_routing_replay=True)
    assert sizes(server) == [1, 1, 1, 1]
    assert all(len(joined(member.rollout_routed_experts)) == len(member.tokens) - 1 for member in group)


@pytest.mark.parametrize(
    ("routed", "said"),
    [
        (None, "sent no routed_experts, which --use-rollout-routing-replay needs"),
        ("!", "routed_experts is no base64"),
        (encoded(np.zeros((2, 1, 2), np.uint8)), "routed_experts covers 2 tokens; expected 5"),
    ],
)
def test_a_reply_that_does_not_tell_its_routing_fails_the_sample(model_dir: Path, tokenizer: Any, routed: Any, said: str) -> None:
    def answer(body: dict[str, Any], n: int) -> Any:
        reply = reply_of("4", tokenizer)
        reply["choices"][0]["routed_experts"] = routed
        return reply

    with pytest.raises(GenerationError, match=said):
        generated(model_dir, answer, group_of(1), use_rollout_routing_replay=True)
