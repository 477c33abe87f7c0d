"""Users' functions, as the tests configure them by path."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from vime.errors import GenerationError
from vime.rollout.filter_hub.base_types import DynamicFilterOutput
from vime.rollout.vllm_rollout import GenerateState, generate
from vime.utils.http_utils import post
from vime.utils.types import Sample

HERE = "tests.unit.rollout.plugins"


async def length_reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """The response's length."""
    return float(sample.response_length)


async def parity_reward(args: Any, sample: Sample) -> float:
    """1 for even indices."""
    return float(sample.index % 2 == 0)


async def group_reward(args: Any, samples: list[Sample]) -> list[float]:
    """Rank within the group."""
    return [float(position) for position in range(len(samples))]


async def one_number(args: Any, samples: Any) -> float:
    """One number whatever it is given."""
    return 1.0


async def nan_reward(args: Any, sample: Sample) -> float:
    """No number."""
    return float("nan")


async def none_reward(args: Any, sample: Sample) -> None:
    """Nothing."""


async def dict_reward(args: Any, sample: Sample) -> dict[str, float]:
    """Several numbers."""
    return {"score": 0.25, "format": 1.0}


async def raising_reward(args: Any, sample: Sample) -> float:
    """Raises."""
    return 1.0 / (sample.response_length * 0)


async def judge_down_for_odd(args: Any, sample: Sample) -> float:
    """Cannot judge odd indices."""
    if sample.index % 2:
        raise GenerationError("the judge is down")
    return 1.0


def drop_odd_groups(args: Any, group: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keeps groups with an even number."""
    odd = group[0].group_index % 2 == 1
    return DynamicFilterOutput(keep=not odd, reason="odd" if odd else None)


def remove_first(args: Any, groups: list[Any]) -> None:
    """Marks the first member of each group."""
    for group in groups:
        group[0].remove_sample = True


async def two_turns(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Generate, append a tool's text, generate again; as slime's plug-ins do it."""
    state = GenerateState(args)
    sample = await generate(args, sample, dict(sampling_params))
    words = state.tokenizer.encode(" tool:4 ", add_special_tokens=False)
    sample.append_response_tokens(args, tokens=words, trainable=False, text=" tool:4 ")
    sample.metadata["evaluation"] = evaluation
    return await generate(args, sample, dict(sampling_params))


async def fan_out(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Two segments of one execution."""
    first = await generate(args, sample, sampling_params)
    first.rollout_id = sample.index
    return [first, copy.deepcopy(first)]


async def fan_out_without_ids(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Forgets rollout_id."""
    first = await generate(args, sample, sampling_params)
    return [first, copy.deepcopy(first)]


async def posts_itself(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Talks to the router with `post`, and notes whose state it found."""
    state = GenerateState(args)
    sample.metadata["same_state"] = GenerateState(args) is state
    ids = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    url = f"http://{args.vllm_router_ip}:{args.vllm_router_port}/inference/v1/generate"
    reply = await post(url, {"token_ids": ids, "sampling_params": {"max_tokens": 4, "logprobs": 0}})
    choice = reply["choices"][0]
    sample.tokens = ids
    sample.append_response_tokens(
        args,
        tokens=choice["token_ids"],
        log_probs=[entry["logprob"] for entry in choice["logprobs"]["content"]],
        text="x",
        status=Sample.Status.COMPLETED,
    )
    return sample


async def slow_tool(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generates, then waits for all its companions in a tool: works only when no slot is held there."""
    sample = await generate(args, sample, sampling_params)
    barrier = sample.metadata["barrier"]
    await barrier.wait()
    return sample


async def cancelled_for_group_1(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Waits for something that was cancelled."""
    sample = await generate(args, sample, sampling_params)
    if sample.group_index == 1:
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lost.cancel()
        await lost
    return sample


async def cancelled_group_reward_for_1(args: Any, samples: list[Sample]) -> list[float]:
    """Cancels the task that it runs in."""
    if samples[0].group_index == 1:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()
    return [1.0] * len(samples)


async def never_returns(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Group 1 hangs."""
    if sample.group_index == 1:
        await asyncio.Event().wait()
    return await generate(args, sample, sampling_params)


async def returns_text(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> str:
    """No sample."""
    return "4"


async def raises_for_odd(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The sandbox of odd indices is gone."""
    if sample.index % 2:
        raise GenerationError("sandbox lost")
    return await generate(args, sample, sampling_params)


async def raises(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """A bug."""
    raise KeyError("nothing here")


class RaisingSource:
    """A data source all of whose methods fail; its constructor does at --rollout-batch-size 1."""

    def __init__(self, args: Any) -> None:
        if args.rollout_batch_size == 1:
            raise KeyError("made")

    def get_samples(self, num_samples: int) -> list[Any]:
        raise KeyError("asked")

    def add_samples(self, samples: list[Any]) -> None:
        """Takes them."""

    def save(self, path: str) -> None:
        raise KeyError("saved")

    def load(self, path: str) -> None:
        raise KeyError("loaded")

    def __len__(self) -> int:
        return 1


def raising_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Raises."""
    return {}["nothing"]


def rollout_of_numbers(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Returns no samples."""
    return [[1, 2]]


def shout(args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    """Notes the step it was called in."""
    sample.metadata["hooked"] = [rollout_id, evaluation]


async def replaced(args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False) -> Sample:
    """Another sample in its place."""
    other = copy.deepcopy(sample)
    other.metadata["hooked"] = [*other.metadata["hooked"], "replaced", sample.reward]
    return other


def returns_a_word(args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False) -> Any:
    """No sample."""
    return "no"


def all_seen(args: Any, all_samples: list[Any], data_source: Any) -> None:
    """Keeps what it saw in the data source."""
    data_source.metadata["seen"] = [group[0].group_index for group in all_samples]
