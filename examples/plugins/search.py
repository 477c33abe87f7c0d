"""Questions to a search server in the middle of a response; every request is made by the plug-in itself.

The model writes `<search>words</search>`, the server's best passages come back between `<information>` tags, and the model goes on.
The server answers POST {"query": ..., "topk": ...} with {"result": [passage, ...]}; a row's metadata names it under "search_url".
It shows how a function talks to the engine without `generate`: `post` to the router, the reply's token ids and log-probabilities
appended as they are.

    vime train ... --custom-generate-function-path examples.plugins.search.generate_with_search \
        --custom-rm-path examples.plugins.search.found
"""

from __future__ import annotations

import re
from typing import Any

from vime.errors import GenerationError, VimeError
from vime.rollout.vllm_rollout import GenerateState
from vime.utils.http_utils import post
from vime.utils.types import Sample

MAX_SEARCHES = 2
QUERY = r"<search>(.*?)</search>"
ENDS = {"stop": Sample.Status.COMPLETED, "length": Sample.Status.TRUNCATED, "abort": Sample.Status.ABORTED}


async def search(url: str, query: str, topk: int = 2) -> str:
    """The server's passages as the model reads them. GenerationError when the server does not answer: no reward is given for that."""
    try:
        reply = await post(url, {"query": query, "topk": topk})
        passages = [str(passage) for passage in reply["result"]]
    except (VimeError, KeyError, TypeError) as error:
        raise GenerationError(f"the search server at {url} gave no passages: {error}") from error
    return "<information>" + "\n".join(passages) + "</information>"


async def ask_engine(args: Any, tokens: list[int], params: dict[str, Any]) -> dict[str, Any]:
    """One request to the router: the engine's first choice."""
    url = f"http://{args.vllm_router_ip}:{args.vllm_router_port}/inference/v1/generate"
    wanted = {"max_tokens": params["max_new_tokens"], "temperature": params["temperature"], "logprobs": 0}
    if params.get("stop"):
        wanted["stop"] = params["stop"]
    reply = await post(url, {"token_ids": tokens, "sampling_params": wanted})
    return dict(reply["choices"][0])


async def generate_with_search(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate, search, generate; the passages are masked out of the loss.

    With --partial-rollout a response may be cut off anywhere and given in again: what was asked, and up to where, is in the metadata.
    """
    state = GenerateState(args)
    pattern = re.compile(sample.metadata.get("search_pattern", QUERY))
    stop = [*sampling_params.get("stop", []), *sample.metadata.get("search_stop", ["</search>"])]
    if not sample.tokens:
        sample.tokens = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    if not sample.response:
        sample.metadata |= {"queries": [], "searched": 0}
    for turn in range(len(sample.metadata["queries"]), MAX_SEARCHES + 1):
        budget = sampling_params["max_new_tokens"] - sample.response_length
        if budget <= 0:
            sample.status = Sample.Status.TRUNCATED
            return sample
        last = turn == MAX_SEARCHES
        params = {**sampling_params, "max_new_tokens": budget, "stop": sampling_params.get("stop") if last else stop}
        choice = await ask_engine(args, sample.tokens, params)
        text = state.tokenizer.decode(choice["token_ids"])
        sample.append_response_tokens(
            args,
            tokens=choice["token_ids"],
            log_probs=[entry["logprob"] for entry in choice["logprobs"]["content"]],
            text=text,
            status=ENDS[choice["finish_reason"]],
        )
        query = None if last else pattern.search(sample.response, sample.metadata["searched"])
        if query is None or sample.status is not Sample.Status.COMPLETED:
            return sample
        passages = await search(sample.metadata["search_url"], query.group(1))
        tokens = state.tokenizer.encode(passages, add_special_tokens=False)
        sample.append_response_tokens(args, tokens=tokens, trainable=False, text=passages)
        sample.metadata["queries"].append(query.group(1))
        sample.metadata["searched"] = len(sample.response)
    return sample


async def found(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1 when the label stands in what the model wrote itself, not in what the server said."""
    own = re.sub(r"<information>.*?</information>", "", sample.response, flags=re.DOTALL)
    return float(str(sample.label) in own)
