"""examples/plugins against a server in this process: functions in slime's style, and what they may rely on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.plugins.best_of_n import best_of_n, has_a_winner
from examples.plugins.search import generate_with_search
from examples.plugins.tool_use import calculate, generate_with_tool
from tests.unit.rollout.support import make_args, reply_of, run, serving
from vime.errors import GenerationError
from vime.rollout.continuous import renewed
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.vllm_rollout import GenerateState, generate_rollout_async
from vime.utils.types import Sample

PLUGINS = "examples.plugins"
Status = Sample.Status


def rollout(
    model_dir: Path, folder: Path, answer: Any, metadata: Any = None, **flags: Any
) -> tuple[list[list[Sample]], list[dict[str, Any]]]:
    """One step of one prompt with two members: its groups, and the requests that were made."""

    async def step() -> Any:
        async with serving(answer) as server:
            row = {"input": "q=", "label": "84", "metadata": {"search_url": f"{server.url}/search"}}
            (folder / "prompts.jsonl").write_text(json.dumps(row) + "\n")
            chosen = {
                "hf_checkpoint": str(model_dir),
                "prompt_data": str(folder / "prompts.jsonl"),
                "label_key": "label",
                "metadata_key": "metadata",
                "rollout_batch_size": 1,
                "n_samples_per_prompt": 2,
                "rollout_max_response_len": 200,
                "rm_type": "exact",
            }
            args = make_args(server.runtime, **(chosen | flags))
            output = await generate_rollout_async(args, 0, RolloutDataSourceWithBuffer(args), False)
            return output.samples, server.requests

    return run(step())


def trained_text(sample: Sample, tokenizer: Any) -> str:
    """What the loss sees of the response."""
    assert sample.loss_mask is not None
    assert len(sample.loss_mask) == sample.response_length == len(sample.rollout_log_probs or ()) == len(sample.weight_versions)
    response = sample.tokens[-sample.response_length :]
    return str(tokenizer.decode([token for token, flag in zip(response, sample.loss_mask, strict=True) if flag]))


def test_a_tools_answer_is_read_by_the_model_and_left_out_of_the_loss(model_dir: Path, tmp_path: Path, tokenizer: Any) -> None:
    said = {"q=": "<calc>12*7</calc>", "q=<calc>12*7</calc> = 84 ": "so 84"}

    def answer(body: Any, n: int) -> Any:
        text = said[tokenizer.decode(body["token_ids"])]
        reply = reply_of(text, tokenizer, reason="stop" if text == "so 84" else "length")
        reply["choices"][0]["finish_reason"] = "stop"  # a stop string leaves no end token
        return reply

    groups, requests = rollout(model_dir, tmp_path, answer, custom_generate_function_path=f"{PLUGINS}.tool_use.generate_with_tool")
    assert "</calc>" in requests[0]["sampling_params"]["stop"]
    for sample in groups[0]:
        assert sample.response == "<calc>12*7</calc> = 84 so 84<|im_end|>"
        assert trained_text(sample, tokenizer) == "<calc>12*7</calc>so 84<|im_end|>"
        assert sample.metadata["calls"] == 1
        assert sample.status is Status.COMPLETED


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12*7", "84"), ("-(3+4)", "-7"), ("2**9999999", "error"), ("__import__('os')", "error"), ("1/0", "error"), ("True", "error")],
)
def test_the_calculator_knows_integers_and_executes_nothing(expression: str, value: str) -> None:
    assert calculate(expression) == value


def searching(tokenizer: Any, passages: Any) -> Any:
    """An engine that searches once and repeats the label, and the search server beside it."""

    def answer(body: Any, n: int) -> Any:
        if "query" in body:
            return passages
        done = tokenizer.decode(body["token_ids"])
        reply = reply_of("it is 84" if "</information>" in done else "<search>12 times 7</search>", tokenizer, reason="length")
        reply["choices"][0]["finish_reason"] = "stop"
        return reply

    return answer


def test_passages_of_a_search_are_read_and_not_trained_on(model_dir: Path, tmp_path: Path, tokenizer: Any) -> None:
    flags = {
        "custom_generate_function_path": f"{PLUGINS}.search.generate_with_search",
        "custom_rm_path": f"{PLUGINS}.search.found",
    }
    groups, requests = rollout(model_dir, tmp_path, searching(tokenizer, {"result": ["84 = 12 * 7"]}), **flags)
    assert {request["query"] for request in requests if "query" in request} == {"12 times 7"}
    for sample in groups[0]:
        assert "<information>84 = 12 * 7</information>" in sample.response
        assert trained_text(sample, tokenizer) == "<search>12 times 7</search>it is 84"
        assert sample.reward == 1.0


@pytest.mark.parametrize("renewed_first", [False, True])
@pytest.mark.parametrize(
    ("function", "parts", "inserted", "counted"),
    [
        (generate_with_tool, ["<calc>12", "*7</calc>", "<calc>2", "+2</calc>", "done"], [" = 84 ", " = 4 "], ("calls", 2)),
        (
            generate_with_search,
            ["<search>a", "b</search>", "<search>c", "d</search>", "done"],
            ["<information>P</information>"] * 2,
            ("queries", ["ab", "cd"]),
        ),
    ],
)
def test_a_call_that_was_cut_in_two_is_answered_when_it_goes_on(
    model_dir: Path, tokenizer: Any, function: Any, parts: list[str], inserted: list[str], counted: tuple[str, Any], renewed_first: bool
) -> None:
    left = [*parts[:3], *parts] if renewed_first else [*parts]

    async def work() -> Sample:
        def answer(body: Any, n: int) -> Any:
            if "query" in body:
                return {"result": ["P"]}
            text = left.pop(0)
            state.aborted = not text.endswith((">", "done"))  # the step has what it needs
            reply = reply_of(text, tokenizer, reason="length")
            reply["choices"][0]["finish_reason"] = "abort" if state.aborted else "stop"
            return reply

        async def step(sample: Sample) -> Any:
            state.aborted = False
            return await function(args, sample, dict(state.sampling_params))

        async with serving(answer) as server:
            args = make_args(server.runtime, hf_checkpoint=str(model_dir), rollout_max_response_len=200)
            sample = Sample(group_index=0, index=0, prompt="q=", metadata={"search_url": f"{server.url}/search"})
            async with GenerateState(args).running() as state:
                if renewed_first:  # cut off after a call, and generated anew: nothing is left of what was
                    sample = await step(await step(sample))
                    assert sample.response.endswith(parts[2])
                    (sample,) = renewed([sample])  # type: ignore[assignment]
                for status in (Status.ABORTED, Status.ABORTED, Status.COMPLETED):
                    sample = await step(sample)
                    assert sample.status is status
            return sample

    sample = run(work())
    assert sample.response == f"{parts[0]}{parts[1]}{inserted[0]}{parts[2]}{parts[3]}{inserted[1]}done"
    assert trained_text(sample, tokenizer) == "".join(parts)
    assert sample.metadata[counted[0]] == counted[1]


def test_a_search_server_that_answers_nonsense_is_no_wrong_answer(model_dir: Path, tmp_path: Path, tokenizer: Any) -> None:
    flags = {"custom_generate_function_path": f"{PLUGINS}.search.generate_with_search", "custom_rm_path": f"{PLUGINS}.search.found"}
    with pytest.raises(GenerationError, match="gave no passages"):
        rollout(model_dir, tmp_path, searching(tokenizer, {"oops": 1}), **flags)


def test_the_nearest_shortest_member_of_a_group_wins_and_groups_without_numbers_are_dropped() -> None:
    responses = ["I say 83", "it is 84 I think", "84", "no idea"]
    group = [Sample(index=n, response=text, response_length=len(text), label="84") for n, text in enumerate(responses)]
    args = make_args()
    assert run(best_of_n(args, group)) == [0.0, 0.0, 1.0, 0.0]
    silent = [Sample(index=n, response="none", label="84") for n in range(2)]
    assert run(best_of_n(args, silent)) == [0.0, 0.0]
    for sample, reward in zip(group, [0.0, 0.0, 1.0, 0.0], strict=True):
        sample.reward = reward
    assert has_a_winner(args, group).keep
    for sample in silent:
        sample.reward = 0.0
    assert has_a_winner(args, silent).reason == "no_winner"


def test_a_group_is_rewarded_as_one(model_dir: Path, tmp_path: Path, tokenizer: Any) -> None:
    flags = {"group_rm": True, "custom_rm_path": f"{PLUGINS}.best_of_n.best_of_n"}
    groups, _ = rollout(model_dir, tmp_path, lambda body, n: reply_of(str(80 + n), tokenizer), **flags)
    assert sorted(sample.reward for sample in groups[0]) == [0.0, 1.0]
    assert next(sample for sample in groups[0] if sample.reward).response.startswith("81")
