"""What is asked of the engine: the continuation of one sample, or the first continuation of a whole group in one request.

group ─▶ shares_request? ─yes▶ one request, n choices ─▶ each choice is a member's answer
              │no                        └ refused or failed ─┐
              └────────────────────────────────────────────────┴▶ one request a member (generation.generate)

Both give the same samples. One request is what saves time where answers are short: HTTP then costs more than generating.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from vime.data.tokenizer import encode_prompt
from vime.errors import DataError, EngineError, GenerationError
from vime.packing.routing import joined
from vime.rollout.base_types import Group
from vime.rollout.engine_client import Generation, derive_seed
from vime.rollout.generate_state import GenerateState
from vime.utils.types import Sample

__all__ = ["continue_group", "continue_sample", "prompt_ids", "shares_request"]

Status = Sample.Status
MOST_TOKENS = 16384  # of one reply, about 80 bytes each; beyond that a request costs nothing against what it generates
GROUPS_PER_ENGINE = 8  # with fewer, whole groups would load several engines unevenly


def prompt_ids(state: GenerateState, sample: Sample) -> list[int]:
    """Token ids [P] of the sample's prompt."""
    kwargs = sample.apply_chat_template_kwargs or {}
    ids = encode_prompt(state.tokenizer, sample.prompt, where=f"sample {sample.index}", tools=sample.metadata.get("tools"), **kwargs)
    if not ids:
        raise DataError(f"sample {sample.index} has an empty prompt. Give --prompt-data, or a rollout function that makes its own prompts.")
    return ids


async def continue_sample(state: GenerateState, sample: Sample, sampling_params: dict[str, Any]) -> None:
    """One more generation for `sample`, appended to it; TRUNCATED as it is when no token may be generated."""
    budget = _budget(state.args, sample, sampling_params)
    if budget <= 0:
        sample.status = Status.TRUNCATED
        return
    params = {**sampling_params, "max_new_tokens": budget}
    if params.get("seed") is not None and sample.response_length:
        params["seed"] = derive_seed(params["seed"], sample.response_length)  # a later turn draws anew
    if params.get("routed_experts") and sample.rollout_routed_experts:
        params["routed_experts_prompt_start"] = len(joined(sample.rollout_routed_experts))
    reply = await state.client.generate(sample.tokens, params, session_id=sample.session_id)
    _append(state, sample, reply, _texts(state, [reply], params)[0])


def shares_request(group: Group, state: GenerateState, sampling_params: dict[str, Any]) -> TypeGuard[list[Sample]]:
    """Whether one request can stand for a request a member: all are untouched, of one prompt, and the engine draws for each alone.

    Not with seeds (they are a member's own) or routed experts, greedy sampling (vLLM refuses n > 1), custom generate functions, or
    sessions of the user's own; nor where the reply would be long, or the limit of requests in flight smaller than the group.
    """
    args, first = state.args, group[0]
    if isinstance(first, list) or not 1 < len(group) <= state.semaphore.size or state.semaphore.held_here:
        return False
    if args.vllm_enable_deterministic_inference or args.custom_generate_function_path:
        return False
    if sampling_params.get("routed_experts"):
        return False  # each choice would repeat the prompt's
    if sampling_params.get("seed") is not None or sampling_params.get("sampling_seed") is not None or sampling_params.get("n") is not None:
        return False
    candidates = 1 + (sampling_params["top_k"] if sampling_params.get("kept_tokens") else 0)
    if not sampling_params.get("temperature", 1.0) or len(group) * sampling_params["max_new_tokens"] * candidates > MOST_TOKENS:
        return False
    if args.num_engines > 1 and args.rollout_batch_size < GROUPS_PER_ENGINE * args.num_engines:
        return False
    return all(isinstance(member, Sample) and _fresh(member) and _asks_the_same(member, first) for member in group)


def _fresh(sample: Sample) -> bool:
    untouched = sample.status is Status.PENDING and not sample.tokens and not sample.response_length
    return untouched and sample.session_id is None and sample.generate_function_path is None


def _asks_the_same(one: Sample, other: Sample) -> bool:
    return (
        one.prompt == other.prompt
        and one.apply_chat_template_kwargs == other.apply_chat_template_kwargs
        and one.metadata.get("tools") == other.metadata.get("tools")
    )


async def continue_group(
    state: GenerateState, group: Sequence[Sample], session_id: str, sampling_params: dict[str, Any]
) -> list[Exception | None]:
    """The first generation of all members in one request, for a group that `shares_request`.

    Returns:
        For each member None (it was continued) or the GenerationError that says why it was not. All None, and the members
        still PENDING, when the request failed: they are then to be asked for one by one.

    Raises:
        DeadlineError: no reply within --rollout-request-timeout. DataError: no prompt.
    """
    ids = prompt_ids(state, group[0])
    for member in group:
        member.tokens = list(ids)
    budget = _budget(state.args, group[0], sampling_params)
    if budget <= 0:
        return [None] * len(group)  # each will find out by itself
    params = {**sampling_params, "max_new_tokens": budget}
    try:
        replies = await state.client.generate_several(ids, params, len(group), session_id=session_id)
    except EngineError:
        return [None] * len(group)
    had = [reply for reply in replies if isinstance(reply, Generation)]
    texts = iter(_texts(state, had, params))
    for member, reply in zip(group, replies, strict=True):
        if isinstance(reply, Generation):
            _append(state, member, reply, next(texts))
    return [reply if isinstance(reply, GenerationError) else None for reply in replies]


def _budget(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> int:
    """Tokens that may yet be generated."""
    budget = int(sampling_params["max_new_tokens"]) - sample.response_length
    if args.rollout_max_context_len is not None:
        budget = min(budget, args.rollout_max_context_len - len(sample.tokens))
    return budget


def _texts(state: GenerateState, replies: Sequence[Generation], params: dict[str, Any]) -> list[str]:
    skip = params.get("skip_special_tokens", False)
    return [state.tokenizer.decode(reply.token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False) for reply in replies]


def _append(state: GenerateState, sample: Sample, reply: Generation, text: str) -> None:
    sample.append_response_tokens(
        state.args,
        tokens=reply.token_ids,
        log_probs=reply.log_probs,
        text=text,
        weight_versions=reply.weight_versions,
        kept=reply.kept,
        routed_experts=reply.routed_experts,
        status=reply.status,
    )
