"""The one door to the engines: `/inference/v1/generate` behind the router, token ids in and out.

The wire format is vLLM's (entrypoints/scale_out/token_in_token_out/protocol.py): the request carries `token_ids` and
`sampling_params`; a choice of the reply carries `token_ids`, `logprobs.content[i].{token_id, logprob}`, `finish_reason`
and `weight_versions` spans `{version, start, end}` over the output's tokens.

With `kept_tokens` true in a request's sampling parameters the reply must tell what top-k and top-p sampling left to choose
from: as `sampling_mask`, where the engine runs with --return-sampling-mask, else as the top_k candidates of each token, of
which those that were cut off have the log-probability -9999. With `routed_experts` true it must tell which experts the tokens went to
(`vime.packing.routing`), the first `routed_experts_prompt_start` tokens left out.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

from vime.errors import DataError, EngineError, GenerationError
from vime.packing.routing import decoded
from vime.utils.http_utils import HttpScope, request_json
from vime.utils.types import Sample

__all__ = ["ENDPOINT", "EngineClient", "Generation", "derive_seed", "engine_sampling_params", "parse_replies", "parse_reply"]

ENDPOINT = "/inference/v1/generate"
SESSION_HEADER = "x-session-id"  # vllm-router's consistent_hash policy sends one session to one engine

_STATUS = {
    "stop": Sample.Status.COMPLETED,
    "length": Sample.Status.TRUNCATED,
    "repetition": Sample.Status.TRUNCATED,  # the engine cut off a loop
    "abort": Sample.Status.ABORTED,
}
# Keys of slime's sampling_params that vLLM calls otherwise, or does not have because we decode ourselves.
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_OURS = frozenset({"skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens", "kept_tokens", "routed_experts"})
_CUT_OFF = -9999.0  # vLLM's log-probability of what cannot be sampled, and of what it does not know


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One reply of an engine. N = number of generated tokens, the end-of-text token included."""

    token_ids: list[int]  # [N]
    log_probs: list[float]  # [N] natural logarithm, of the distribution that was sampled from
    weight_versions: list[str]  # [N] the weight version each token was sampled under; "" when the engine does not say
    status: Sample.Status
    kept: list[list[int]] | None = None  # [N] the tokens each was drawn from, when that was asked for
    routed_experts: str | None = None  # the experts of all tokens but the last that no earlier reply covered, when that was asked for


class EngineClient:
    """Sends generation requests to the router; holds a slot of the scope's limit only while one is in flight."""

    def __init__(self, scope: HttpScope, *, model: str | None = None) -> None:
        """`model`: the adapter that is the policy; None: the engines' own model."""
        self.scope = scope
        self._asked: dict[str, Any] = {} if model is None else {"model": model}
        self.url = scope.base_url + ENDPOINT

    async def generate(self, token_ids: list[int], sampling_params: dict[str, Any], *, session_id: str | None = None) -> Generation:
        """Continue `token_ids` [T].

        Args:
            sampling_params: slime's names (max_new_tokens, ...) or vLLM's.
            session_id: keeps a session on one engine where the router's policy does so; a retry goes elsewhere.

        When the scope is stopped nothing is sent, and the reply is empty and ABORTED.

        Raises:
            EngineError: refused (4xx), or still failing after the retries, or the reply is torn.
            DeadlineError: no reply within --rollout-request-timeout, in the last try either.
            GenerationError: the engine could not give a log-probability for a token.
        """
        payload = {**self._asked, "token_ids": token_ids, "sampling_params": engine_sampling_params(sampling_params)}
        headers = {SESSION_HEADER: session_id} if session_id else None
        async with self.scope.slot(self.url):
            if self.scope.stopped:
                return _nothing(sampling_params)
            reply = await request_json(self.scope.open(), "POST", self.url, payload, policy=self.scope.policy, first_try_headers=headers)
        found = parse_reply(reply, self.url, kept=bool(sampling_params.get("kept_tokens")))
        if sampling_params.get("routed_experts") and found.token_ids:
            _check_routing(found, len(token_ids) - sampling_params.get("routed_experts_prompt_start", 0), self.url)
        return found

    async def generate_several(
        self, token_ids: list[int], sampling_params: dict[str, Any], count: int, *, session_id: str | None = None
    ) -> list[Generation | GenerationError]:
        """`count` independent continuations of `token_ids` [T] in one request; `sampling_params` must have no seed.

        A continuation that could not be had is the GenerationError that `generate` would have raised.

        Raises:
            EngineError, DeadlineError: as `generate`, for all of them.
        """
        payload = {**self._asked, "token_ids": token_ids, "sampling_params": {**engine_sampling_params(sampling_params), "n": count}}
        headers = {SESSION_HEADER: session_id} if session_id else None
        async with self.scope.slot(self.url, count):
            if self.scope.stopped:
                return [_nothing(sampling_params) for _ in range(count)]
            reply = await request_json(self.scope.open(), "POST", self.url, payload, policy=self.scope.policy, first_try_headers=headers)
        return parse_replies(reply, count, self.url, kept=bool(sampling_params.get("kept_tokens")))


def _nothing(sampling_params: dict[str, Any]) -> Generation:
    """The reply to a request that was not sent, because the step had what it needed."""
    kept: list[list[int]] | None = [] if sampling_params.get("kept_tokens") else None
    return Generation(token_ids=[], log_probs=[], weight_versions=[], status=Sample.Status.ABORTED, kept=kept)


def engine_sampling_params(params: dict[str, Any]) -> dict[str, Any]:
    """`params` as vLLM's SamplingParams; log-probabilities of the sampled tokens are always asked for."""
    out = {_RENAMED.get(name, name): value for name, value in params.items() if name not in _OURS and value is not None}
    for name in ("stop", "stop_token_ids"):
        if not out.get(name):
            out.pop(name, None)
    out["logprobs"] = params["top_k"] if params.get("kept_tokens") else 0  # 0: the sampled token's own
    out["detokenize"] = "stop" in out  # stop strings are found in text; without them the engine need not make any
    return out


def parse_reply(reply: Any, url: str, *, kept: bool = False) -> Generation:
    """Check a reply and take out what a sample needs.

    Raises:
        EngineError: fields are missing, or tokens, log-probs and version spans do not match in length.
        GenerationError: the engine ended with an error, or has no log-probability for a token.
    """
    try:
        choice = reply["choices"][0]
    except (KeyError, IndexError, TypeError) as error:
        raise _torn(reply, url) from error
    return _parse_choice(choice, url, kept)


def parse_replies(reply: Any, count: int, url: str, *, kept: bool = False) -> list[Generation | GenerationError]:
    """The `count` choices of a reply, by their index; each as `parse_reply`, a GenerationError in place of what was not had.

    Raises:
        EngineError: a choice is missing, twice there, or torn.
    """
    try:
        choices = {choice["index"]: choice for choice in reply["choices"]}
    except (KeyError, TypeError) as error:
        raise _torn(reply, url) from error
    if sorted(choices) != list(range(count)) or len(reply["choices"]) != count:
        raise EngineError(f"{url} sent {len(reply['choices'])} choices, numbered {list(choices)}, where {count} were asked for.")
    found: list[Generation | GenerationError] = []
    for index in range(count):
        try:
            found.append(_parse_choice(choices[index], url, kept))
        except GenerationError as error:
            found.append(error)
    return found


def _torn(reply: Any, url: str) -> EngineError:
    return EngineError(f"{url} sent a reply without choices[0].token_ids/logprobs/finish_reason: {str(reply)[:300]}.")


def _parse_choice(choice: Any, url: str, kept: bool) -> Generation:
    try:
        tokens = [int(token) for token in choice["token_ids"] or []]
        entries = (choice["logprobs"] or {}).get("content") or []
        reason = choice["finish_reason"]
    except (KeyError, TypeError, AttributeError) as error:
        raise _torn(choice, url) from error
    if reason not in _STATUS:
        raise GenerationError(f"{url} ended a generation with finish_reason {reason!r}; the engine's log says why.")
    if len(entries) != len(tokens):
        raise EngineError(
            f"{url} sent {len(tokens)} token_ids but {len(entries)} logprobs; the reply is torn or the engine is not asked right."
        )
    log_probs = []
    for position, (token, entry) in enumerate(zip(tokens, entries, strict=True)):
        if entry["token_id"] != token:
            raise EngineError(f"{url}: logprobs[{position}] belongs to token {entry['token_id']}, but the token is {token}.")
        value = float(entry["logprob"])
        if not math.isfinite(value) or value <= _CUT_OFF:
            raise GenerationError(f"{url} has no log-probability for token {token} at position {position} (got {value}).")
        log_probs.append(value)
    versions = _expand(choice.get("weight_versions"), len(tokens), url)
    sets = _kept(choice, tokens, entries, url) if kept else None
    return Generation(
        token_ids=tokens, log_probs=log_probs, weight_versions=versions, status=_STATUS[reason], kept=sets,
        routed_experts=choice.get("routed_experts"),
    )  # fmt: skip


def _check_routing(found: Generation, before: int, url: str) -> None:
    """The reply's routing is of the `before` tokens that were asked about, and of what was generated but the last token."""
    if found.routed_experts is None:
        raise EngineError(
            f"{url} sent no routed_experts, which --use-rollout-routing-replay needs: the engine must run with "
            "--enable-return-routed-experts."
        )
    try:
        count = len(decoded(found.routed_experts))
    except DataError as error:
        raise EngineError(f"{url}: {error}") from error
    if count != before + len(found.token_ids) - 1:
        raise EngineError(f"{url}: routed_experts covers {count} tokens; expected {before + len(found.token_ids) - 1}.")


def _kept(choice: Any, tokens: list[int], entries: list[Any], url: str) -> list[list[int]]:
    """What each token was drawn from, ascending."""
    mask = choice.get("sampling_mask")
    if mask is not None and len(mask) != len(tokens):
        raise EngineError(f"{url}: sampling_mask covers {len(mask)} tokens of {len(tokens)}.")
    if mask is None:
        mask = [[c["token_id"] for c in entry.get("top_logprobs") or () if c["logprob"] > _CUT_OFF] for entry in entries]
    for position, (token, ids) in enumerate(zip(tokens, mask, strict=True)):
        if token not in ids:
            raise EngineError(
                f"{url}: token {token} at position {position} is not among the {len(ids)} tokens it was sampled from; the engine must "
                "answer with top_logprobs or with a sampling_mask."
            )
    return [sorted(set(ids)) for ids in mask]


def _expand(spans: list[dict[str, Any]] | None, count: int, url: str) -> list[str]:
    """Spans {version, start, end} as one version a token."""
    if not spans:
        return [""] * count
    versions: list[str] = []
    for span in spans:
        if span["start"] != len(versions) or span["end"] < span["start"]:
            raise EngineError(f"{url}: weight_versions spans are not contiguous: {spans}.")
        versions += [str(span["version"])] * (span["end"] - span["start"])
    if len(versions) != count:
        raise EngineError(f"{url}: weight_versions cover {len(versions)} tokens of {count}: {spans}.")
    return versions


def derive_seed(*parts: object) -> int:
    """A sampling seed (31 bits) that is a function of `parts` alone, on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
