"""Evaluation: the held-out files of --eval-prompt-data, with the evaluation's sampling parameters."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from vime.data.prompts import PromptFormat, fresh_copy, load_prompts
from vime.errors import ConfigError, DeadlineError, GenerationError
from vime.rollout.base_types import Group, RolloutFnEvalOutput
from vime.rollout.collect import cancel_all
from vime.rollout.engine_client import derive_seed
from vime.rollout.generate_state import GenerateState
from vime.rollout.generation import CANCELLED, generate_and_rm_group, usable
from vime.rollout.metrics import eval_metrics
from vime.rollout.rm_hub.registry import needs_label
from vime.utils.types import Sample

UNTRAINED = {"kept_tokens": False, "routed_experts": False}  # what only training needs to know

__all__ = ["eval_files", "evaluate"]


def eval_files(args: Any) -> list[tuple[str, str]]:
    """(name, path) pairs of --eval-prompt-data.

    Raises:
        ConfigError: none given, an odd number of words, or a name twice.
    """
    words = list(args.eval_prompt_data)
    if not words:
        raise ConfigError("Evaluation was asked for, but --eval-prompt-data is not given: name path [name path ...].")
    names = words[::2]
    if len(words) % 2 or len(set(names)) < len(names):
        raise ConfigError(f"--eval-prompt-data {' '.join(words)}: must be pairs 'name path', each name once.")
    return list(zip(names, words[1::2], strict=True))


async def evaluate(state: GenerateState) -> RolloutFnEvalOutput:
    """Generate and score every held-out file, one after the other.

    Samples that could not be had are left out of the mean and counted (eval/{name}-failed).

    Raises:
        DeadlineError: --rollout-deadline ran out over all files. GenerationError: no sample of a file could be had.
    """
    begun = time.monotonic()
    output = RolloutFnEvalOutput(data={})
    for name, path in eval_files(state.args):
        groups = _groups(state, name, path)
        samples, failed = await _run(state, name, groups, begun)
        key = state.args.eval_reward_key or state.args.reward_key
        rewards = [float(sample.reward[key] if isinstance(sample.reward, dict) else sample.reward) for sample in samples]  # type: ignore[arg-type, index]
        truncated = [sample.status is Sample.Status.TRUNCATED for sample in samples]
        output.data[name] = {"rewards": rewards, "truncated": truncated, "samples": samples}
        output.metrics |= eval_metrics(name, rewards, samples, failed)
    return output


def eval_sampling_params(state: GenerateState) -> dict[str, Any]:
    """The rollout's sampling parameters with the --eval-... ones over them."""
    args = state.args
    over = {
        "temperature": args.eval_temperature,
        "top_p": args.eval_top_p,
        "top_k": args.eval_top_k,
        "max_new_tokens": args.eval_max_response_len,
    }
    return {**state.sampling_params, **{name: value for name, value in over.items() if value is not None}, **UNTRAINED}


def _groups(state: GenerateState, name: str, path: str) -> list[Group]:
    """n_samples_per_eval_prompt samples of each prompt; ids are those of this file alone."""
    form = PromptFormat.of(state.args, needs_label=needs_label(), evaluation=True)
    prompts = load_prompts(path, form, state.tokenizer, flag=f"--eval-prompt-data {name}").samples
    count = state.args.n_samples_per_eval_prompt
    groups: list[Group] = []
    for group_index, prompt in enumerate(prompts):
        group: Group = []
        for position in range(count):
            sample = fresh_copy(prompt)
            sample.group_index, sample.index = group_index, group_index * count + position
            group.append(sample)
        groups.append(group)
    return groups


async def _run(state: GenerateState, name: str, groups: list[Group], begun: float) -> tuple[list[Sample], int]:
    """(samples that were had, in the file's order; number of those that were not)."""
    args = state.args
    params = eval_sampling_params(state)
    if args.vllm_enable_deterministic_inference:
        params["seed"] = derive_seed(args.rollout_seed, "eval", name)
    tasks = [asyncio.ensure_future(generate_and_rm_group(args, group, params, evaluation=True)) for group in groups]
    running = set(tasks)
    try:
        while running:
            left = args.rollout_deadline - (time.monotonic() - begun)
            done, running = await asyncio.wait(running, timeout=max(left, 0.0), return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                error = _error_of(task)
                if error is not None and not isinstance(error, GenerationError):
                    raise error
            if not done:
                raise DeadlineError(
                    peer=f"evaluation '{name}'",
                    phase="generate",
                    seconds=args.rollout_deadline,
                    progress=f"{len(tasks) - len(running)} of {len(tasks)} prompts",
                    cure="Evaluate fewer prompts, or raise --rollout-deadline.",
                )
    finally:
        await cancel_all(tasks)
    finished = [task.result() for task in tasks if _error_of(task) is None]
    samples = [sample for group in finished for sample in usable(group)]
    if not samples:
        raise GenerationError(f"evaluation '{name}': no sample could be had. The last cause: {_error_of(tasks[-1])}")
    return samples, sum(len(group) for group in groups) - len(samples)


def _error_of(task: asyncio.Task[Group]) -> BaseException | None:
    """What a finished group raised; a cancellation of its own is a group that could not be had."""
    return GenerationError(CANCELLED) if task.cancelled() else task.exception()
