"""One sample, one group: generate, score, and record what failed.

group ─▶ each member: generate (engine, or the custom function) ─▶ reward ─▶ COMPLETED | TRUNCATED
                               └── engine, tool or judge failed ──────────▶ FAILED (counted, never scored 0)
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any

from vime.errors import DeadlineError, GenerationError, HookError, PeerError
from vime.hooks import hook_errors
from vime.rollout.base_types import Group
from vime.rollout.engine_client import derive_seed
from vime.rollout.generate_state import GenerateState
from vime.rollout.rm_hub.scoring import async_rm, batched_async_rm
from vime.rollout.sampling import continue_group, continue_sample, prompt_ids, shares_request
from vime.rollout.teacher import ask_teacher, needs_teacher
from vime.utils.types import Sample

__all__ = ["CANCELLED", "all_or_cancel", "generate", "generate_and_rm", "generate_and_rm_group", "is_done", "segments", "usable"]

Status = Sample.Status
FLAG = "--custom-generate-function-path"
HOOK_FLAG = "--rollout-sample-hook-path"
DONE = (Status.COMPLETED, Status.TRUNCATED)
CANCELLED = "a generate function, reward or hook ended in a cancellation (CancelledError) of its own."


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Let the engine continue `sample`; its tokens, log-probabilities and weight versions are appended to it.

    A sample without tokens is encoded from its prompt first. The engine may generate what `max_new_tokens` and
    --rollout-max-context-len leave; when that is nothing the sample is TRUNCATED as it is. A generation that the engine
    cut off (ABORTED) is continued, --rollout-request-retries times at most; in a step that has what it needs
    (`GenerateState.aborted`) it is left ABORTED, to be continued from its tokens in a later step.

    Raises:
        EngineError, DeadlineError, GenerationError: see `EngineClient.generate`.
        DataError: the sample has no prompt.
    """
    state = GenerateState(args)
    async with state.borrowed():
        if not sample.tokens:
            sample.tokens = prompt_ids(state, sample)
        await _continue(state, sample, sampling_params, args.rollout_request_retries + 1)
    return sample


async def _continue(state: GenerateState, sample: Sample, sampling_params: dict[str, Any], tries: int) -> None:
    """Continue `sample` until it is not cut off, `tries` times at most."""
    for _ in range(tries):
        await continue_sample(state, sample, sampling_params)
        if sample.status is not Status.ABORTED or state.aborted:
            break


async def generate_and_rm(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample | list[Sample]:
    """Generate one sample and score it (with --group-rm scoring is left to the group).

    Raises:
        GenerationError, EngineError, DeadlineError: the sample cannot be had.
        HookError: a custom function raised, or returned what is no sample.
    """
    if is_done(sample, args):
        return sample
    state = GenerateState(args)
    if state.aborted:
        sample.status = Status.ABORTED
        return sample
    path = sample.generate_function_path or args.custom_generate_function_path
    result: Sample | list[Sample]
    if path:
        function, takes_evaluation = state.generate_hook(path)
        extra = {"evaluation": evaluation} if takes_evaluation else {}
        with hook_errors(FLAG, path, function):
            result = await function(args, sample, dict(sampling_params), **extra)
        _check_result(result, sample, path)
    else:
        result = await generate(args, sample, dict(sampling_params))
    return await _finish(state, result, sample, evaluation)


async def _finish(state: GenerateState, result: Sample | list[Sample], sample: Sample, evaluation: bool) -> Sample | list[Sample]:
    """Hooks, rewards and a teacher's log-probs for what was generated for `sample`; nothing for what is to be continued later."""
    args = state.args
    parts = list(segments([result]))
    if any(part.status is Status.ABORTED for part in parts):
        if state.aborted:
            return result
        raise GenerationError(f"sample {sample.index} was cut off by the engine, and again when it was continued.")
    if args.rollout_sample_hook_path:
        parts = [await _hooked(state, part, evaluation) for part in parts]
        result = parts if isinstance(result, list) else parts[0]
    if not args.group_rm:
        unscored = [part for part in parts if part.reward is None and part.status is not Status.FAILED]
        rewards = await all_or_cancel(async_rm(args, part, evaluation) for part in unscored)
        for part, reward in zip(unscored, rewards, strict=True):
            part.reward = reward
    if needs_teacher(args, evaluation=evaluation):
        await ask_teacher(args, parts)
    return result


async def _hooked(state: GenerateState, part: Sample, evaluation: bool) -> Sample:
    """The sample after all --rollout-sample-hook-path: one of them may return another in its place."""
    for path, function in state.sample_hooks():
        where = f"{HOOK_FLAG} {path}, sample {part.index}"
        with hook_errors(HOOK_FLAG, path, function):
            made = function(state.args, part, rollout_id=state.rollout_id, evaluation=evaluation)
            made = await made if inspect.isawaitable(made) else made
        if made is not None:
            if not isinstance(made, Sample):
                raise HookError(f"{where}: it returned a {type(made).__name__}; it must return a Sample, or None for the one it was given.")
            part = made
        _check_lengths(part, where)
    return part


async def generate_and_rm_group(args: Any, group: Group, sampling_params: dict[str, Any], evaluation: bool = False) -> Group:
    """Generate and score the members of one group, all at once.

    A member whose engine, tool or judge failed comes back FAILED, the cause in `metadata["failure"]`. In a step that has what
    it needs (`GenerateState.aborted`) members come back ABORTED: the group is unfinished, and may be given in again.

    Raises:
        GenerationError: no member could be had, or the group's judge (--group-rm) failed.
        HookError, RewardError, DataError, ConfigError: the run must not go on.
    """
    state = GenerateState(args)
    if shares_request(group, state, sampling_params):
        async with state.borrowed():
            done: Group = await _members_at_once(state, group, sampling_params, evaluation)
    else:
        done = await all_or_cancel(_member(args, member, sampling_params, evaluation) for member in group)
    good = usable(done)
    if not good:
        causes = sorted({str(part.metadata.get("failure", "its generate function set FAILED")) for part in segments(done)})
        raise GenerationError(f"none of the {len(group)} samples of group {_group_id(group)} could be had: {'; '.join(causes)}")
    if any(part.status is Status.ABORTED for part in good):
        return done
    unscored = [part for part in good if part.reward is None]
    if args.group_rm and unscored:
        try:
            rewards = await batched_async_rm(args, unscored, evaluation)
        except PeerError as error:
            raise GenerationError(f"the judge of group {_group_id(group)} failed: {error}") from error
        for part, reward in zip(unscored, rewards, strict=True):
            part.reward = reward
    return done


async def _members_at_once(state: GenerateState, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool) -> Group:
    """The members of a group that `shares_request`: generated by one request, then each scored by itself."""
    args = state.args
    for member in group:
        member.session_id = _session_id(args, member)
    try:
        problems: list[Exception | None] = await continue_group(state, group, str(group[0].session_id), sampling_params)
    except DeadlineError as error:
        problems = [error] * len(group)
    for member, problem in zip(group, problems, strict=True):
        if problem is not None:
            _mark_failed(member, problem)
    return await all_or_cancel(_answered(state, member, sampling_params, evaluation) for member in group)


async def _answered(state: GenerateState, member: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Sample | list[Sample]:
    """Finish a member after its group's request: continue it where it was cut off, score it."""
    if member.status is Status.FAILED:
        return member
    if member.status is Status.PENDING:
        return await _member(state.args, member, sampling_params, evaluation)
    try:
        if member.status is Status.ABORTED and not state.aborted:
            await _continue(state, member, sampling_params, state.args.rollout_request_retries)
        return await _finish(state, member, member, evaluation)
    except (GenerationError, PeerError) as error:
        _mark_failed(member, error)
    return member


async def _member(args: Any, member: Sample | list[Sample], sampling_params: dict[str, Any], evaluation: bool) -> Sample | list[Sample]:
    if isinstance(member, list):
        return member  # a fan-out that was finished earlier
    if member.session_id is None:
        member.session_id = _session_id(args, member)
    params = dict(sampling_params)
    if args.vllm_enable_deterministic_inference and params.get("seed") is None:
        params["seed"] = derive_seed(args.rollout_seed, "train", member.index)
    elif params.get("seed") is not None:
        params["seed"] = derive_seed(params["seed"], member.index)
    try:
        return await generate_and_rm(args, member, params, evaluation)
    except (GenerationError, PeerError) as error:
        _mark_failed(member, error)
        return member


def _session_id(args: Any, sample: Sample) -> str:
    return f"{args.rollout_seed}-{sample.group_index}-{sample.index}"


def _mark_failed(sample: Sample, error: Exception) -> None:
    sample.status = Status.FAILED
    sample.reward = None
    sample.metadata["failure"] = f"{type(error).__name__}: {error}"


def is_done(sample: Sample, args: Any) -> bool:
    """Whether a sample that came from the buffer needs nothing more."""
    scored = sample.reward is not None or args.group_rm
    return (sample.status in DONE and scored) or (sample.status is Status.FAILED and "failure" in sample.metadata)


def segments(group: Iterable[Sample | list[Sample]]) -> Iterator[Sample]:
    """All samples of a group, fan-outs unfolded."""
    for member in group:
        if isinstance(member, list):
            yield from member
        else:
            yield member


def usable(group: Iterable[Sample | list[Sample]]) -> list[Sample]:
    """The samples of a group that were had."""
    return [part for part in segments(group) if part.status is not Status.FAILED]


async def all_or_cancel[T](work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; when one raises (or we are cancelled) the others are cancelled and awaited first.

    Raises:
        GenerationError: one was cancelled, and not by us.
    """
    loop = asyncio.get_running_loop()
    tasks = [asyncio.Task(one, loop=loop, eager_start=True) for one in work]  # what needs no waiting is done at once
    if not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    errors = [task.exception() for task in tasks if not task.cancelled()]  # all are looked at, so that none is reported as lost
    for error in errors:
        if error is not None:
            raise error
    if any(task.cancelled() for task in tasks):  # not by us: we cancel after an error, raised above, or when we are cancelled ourselves
        raise GenerationError(CANCELLED)
    return [task.result() for task in tasks]


def _check_result(result: Any, sample: Sample, path: str) -> None:
    """A custom generate function's result is a sample, or a list of samples of one rollout, and consistent."""
    where = f"{FLAG} {path}, sample {sample.index}"
    if isinstance(result, list):
        if not result or not all(isinstance(part, Sample) for part in result):
            raise HookError(f"{where}: it returned a list that is empty or holds other things than Sample.")
        ids = {part.rollout_id for part in result}
        if None in ids or len(ids) > 1:
            raise HookError(
                f"{where}: it returned {len(result)} samples with rollout_id {sorted(map(str, ids))}. "
                "Siblings of one execution must all carry the same rollout_id (e.g. sample.index), or their advantages cannot be computed."
            )
    elif not isinstance(result, Sample):
        raise HookError(f"{where}: it returned a {type(result).__name__}; it must return the Sample, or a list of Samples.")
    for part in segments([result]):
        _check_lengths(part, where)


def _check_lengths(part: Sample, where: str) -> None:
    if part.status is Status.PENDING and part.response_length:
        part.status = Status.COMPLETED
    if part.status in (Status.FAILED, Status.ABORTED):
        return
    if not 0 < part.response_length <= len(part.tokens):
        raise HookError(
            f"{where}: response_length is {part.response_length} with {len(part.tokens)} tokens. "
            "It must be at least 1 and at most their number; set status FAILED (or raise vime.errors.GenerationError) "
            "for a sample that cannot be had."
        )
    for name in ("loss_mask", "rollout_log_probs", "weight_versions"):
        value = getattr(part, name)
        if value and len(value) != part.response_length:
            raise HookError(
                f"{where}: {name} has {len(value)} entries for {part.response_length} response tokens. Use sample.append_response_tokens."
            )


def _group_id(group: Group) -> int | None:
    return next(segments(group)).group_index
