"""On-policy distillation with a teacher that a vLLM server holds: its log-probability of each token that the student sampled."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from vime.errors import EngineError, GenerationError
from vime.utils.http_utils import post
from vime.utils.types import Sample

__all__ = ["ask_teacher", "needs_teacher", "parse_prompt_log_probs"]


def needs_teacher(args: Any, *, evaluation: bool) -> bool:
    """Whether samples need the log-probs of a teacher server."""
    return not evaluation and args.use_opd and args.opd_type == "vllm"


async def ask_teacher(args: Any, samples: Iterable[Sample]) -> None:
    """Set `teacher_log_probs` [R] of the samples that have none, each by one request to --opd-teacher-url.

    Raises:
        EngineError, DeadlineError: the server refused, or failed after the retries. GenerationError: it has no number for a token.
    """
    for sample in samples:
        if sample.teacher_log_probs is not None or sample.status is Sample.Status.FAILED:
            continue
        url = f"{args.opd_teacher_url.rstrip('/')}/v1/completions"
        payload = {"prompt": sample.tokens, "max_tokens": 1, "prompt_logprobs": 0}
        reply = await post(url, payload, max_retries=args.rollout_request_retries, timeout=args.rollout_request_timeout)
        sample.teacher_log_probs = parse_prompt_log_probs(reply, sample.tokens, url)[len(sample.tokens) - sample.response_length :]


def parse_prompt_log_probs(reply: Any, tokens: list[int], url: str) -> list[float]:
    """[T] natural logs of each token given what precedes it; the first, which nothing precedes, as 0."""
    try:
        entries = reply["choices"][0]["prompt_logprobs"]
        found = [0.0] + [float(entry[str(token)]["logprob"]) for entry, token in zip(entries[1:], tokens[1:], strict=True)]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(
            f"the teacher at {url} sent no prompt_logprobs of the {len(tokens)} tokens asked about ({error!r}): {str(reply)[:300]}. "
            "It must be a vLLM server of a model with the student's tokenizer."
        ) from error
    if not all(map(math.isfinite, found)):
        raise GenerationError(f"the teacher at {url} has no log-probability for one of {len(tokens)} tokens.")
    return found
