"""The handshake at start: engines and router are asked what they are, and what they say is held against the configuration.

Nothing is inferred from version numbers. Endpoints are probed by asking for them with a method that changes nothing: a server
answers 404 for a path that it does not have, and 405 for one that wants POST. What the engines compute with comes from their
workers (`WorkerExtension.vime_identity`), not from the command line that they were given.
All disagreements are reported in one error that names both sides; every question has a deadline.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vime.backends.vllm_utils.plugin import BACKENDS
from vime.backends.vllm_utils.router import DEFAULT_POLICY, RouterClient
from vime.backends.weight_transfer.control import EngineControl, EngineEndpoint
from vime.config import RunConfig
from vime.config.sections import POLICY_ADAPTER
from vime.errors import CheckpointError, ConfigError, EngineError

__all__ = ["FRESH_WEIGHTS", "SERVED_NAME", "EngineFacts", "ask_engine", "check_router", "check_workers", "greet_engine", "shake_hands"]

FRESH_WEIGHTS = "default"  # the weight version of an engine that has been sent none
SERVED_NAME = "vime"
SECONDS = 60.0  # for each question
_PROBE = [1, 2, 3]  # token ids of the request that goes through the router
_ROUTER_QUEUE = 100  # vllm-router's own --queue-size

GENERATE = "/inference/v1/generate"
_DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1"
_TOO_OLD = "this vLLM cannot be sent weights: take one that `vime doctor` calls tested"
NEEDED = {  # path -> what an engine without it lacks
    "/health": "it is no vLLM server",
    "/version": "it is no vLLM server",
    GENERATE: "start it with --enable-scale-out",
    "/pause": _DEV_MODE,
    "/resume": _DEV_MODE,
    "/is_paused": _DEV_MODE,
    "/abort_requests": _DEV_MODE,
    "/reset_prefix_cache": _DEV_MODE,
    "/collective_rpc": _DEV_MODE,
    "/init_weight_transfer_engine": _TOO_OLD,
    "/start_weight_update": _TOO_OLD,
    "/update_weights": _TOO_OLD,
    "/finish_weight_update": _TOO_OLD,
    "/weight_info": _TOO_OLD,
}
_MAY_DIFFER = ("name", "url", "max_requests", "max_logprobs", "weight_version", "paused")  # from engine to engine
_DTYPES = {"half": "float16", "float": "float32", "auto": None}  # other names of vLLM's --dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine says it is. `max_requests`: how many it holds before it refuses one; None = without bound."""

    name: str
    url: str
    vllm: str
    model: str
    served_name: str
    dtype: str
    vocab_size: int
    max_model_len: int
    world_size: int  # workers that answered
    tensor_parallel_size: int
    weight_version: str
    paused: bool
    logprobs_mode: str
    generation_config: str
    transport: str
    max_requests: int | None
    max_logprobs: int  # of one token; -1 = all

    def __str__(self) -> str:
        return f"{self.name} at {self.url}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """A value, who wants it, and what to do when an engine has another."""

    value: Any
    source: str
    cure: str


def missing_endpoints(control: EngineControl) -> list[str]:
    """The paths of NEEDED that the engine does not serve, each with its cure."""
    return [f"{path} ({cure})" for path, cure in NEEDED.items() if not control.serves(path, SECONDS)]


def ask_engine(control: EngineControl) -> EngineFacts:
    """Ask an engine what it is. EngineError when it lacks an endpoint (each is named), or one of our worker's methods."""
    lacks = missing_endpoints(control)
    if lacks:
        raise EngineError(f"{control.name} at {control.url} lacks " + "; ".join(lacks) + ".")
    workers = control.call("POST", "/collective_rpc", {"method": "vime_identity"}, seconds=SECONDS)["results"]
    if not workers or any(worker != workers[0] for worker in workers):
        raise EngineError(f"{control.name} at {control.url}: its workers differ from one another: {workers}. Start it anew.")
    return EngineFacts(
        name=control.name,
        url=control.url,
        vllm=str(control.call("GET", "/version", seconds=SECONDS)["version"]),
        weight_version=control.weight_version(),
        paused=control.is_paused(),
        world_size=len(workers),
        **workers[0],
    )


def greet_engine(config: RunConfig, control: EngineControl) -> EngineFacts:
    """Ask one engine, as it comes up, and hold it against the configuration; EngineError with all that disagrees."""
    facts = ask_engine(control)
    _raise_if(engine_disagreements(config, [facts]))
    return facts


def shake_hands(config: RunConfig, endpoints: Sequence[EngineEndpoint], router: RouterClient) -> list[EngineFacts]:
    """Ask all engines and the router that stands before them, before the first rollout.

    Raises:
        EngineError: all disagreements between configuration, engines and router, numbered.
        DeadlineError: one of them did not answer.
    """
    facts = [ask_engine(EngineControl.of(endpoint)) for endpoint in endpoints]
    problems = list(engine_disagreements(config, facts))
    waiting = [engine for engine in facts if engine.paused]  # external ones, whose weights are half loaded: the first sync mends that
    for endpoint in endpoints:
        problems += _reply_problems(EngineControl.of(endpoint)) if not waiting else []
    if len(facts) != config.num_engines:
        problems.append(f"{len(facts)} engines came up, --rollout-num-gpus and --rollout-num-gpus-per-engine ask for {config.num_engines}.")
    problems += router_disagreements(config, [endpoint.url for endpoint in endpoints], router, ask=not waiting)
    _raise_if(problems)
    return facts


def _reply_problems(control: EngineControl) -> list[str]:
    """Whether a generated token comes with what training needs."""
    params = {"max_tokens": 1, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    reply = control.call("POST", GENERATE, {"token_ids": _PROBE, "sampling_params": params}, seconds=SECONDS)
    choice = (reply.get("choices") or [{}])[0]
    content = (choice.get("logprobs") or {}).get("content") or [{}]
    there = {
        "token ids": len(choice.get("token_ids") or []) == 1,
        "log-probs": "logprob" in content[0],
        "weight versions": bool(choice.get("weight_versions")),
    }
    return [
        f"{control.name} at {control.url}: its replies carry no {what}, which training needs. Take a vLLM that `vime doctor` calls tested."
        for what, found in there.items()
        if not found
    ]


def engine_disagreements(config: RunConfig, engines: Sequence[EngineFacts]) -> Iterator[str]:
    """What the engines say against the configuration, then what they say against one another."""
    wanted = _expectations(config)
    for engine in engines:
        for field, expected in wanted.items():
            found = getattr(engine, field)
            if found != expected.value:
                yield f"{engine}: {_words(field)} is {_shown(found)}, {expected.source} {_shown(expected.value)}. {expected.cure}"
        yield from _too_small(config, engine)
    for engine in engines[1:]:
        first = engines[0]
        for field in (each.name for each in fields(EngineFacts)):
            here, there = getattr(engine, field), getattr(first, field)
            if field not in wanted and field not in _MAY_DIFFER and here != there:
                yield (
                    f"{_words(field)} of {engine} is {_shown(here)}, that of {first} is {_shown(there)}. "
                    "All engines of a run must be alike: start them with the same vLLM and the same flags."
                )


def router_disagreements(config: RunConfig, urls: Sequence[str], router: RouterClient, *, ask: bool = True) -> list[str]:
    """The router has exactly our engines, all of them healthy, passes requests on, and has the policy that was asked for.

    Without `ask` no request is sent through it, and so its policy is not known.
    """
    health = router.worker_health()
    problems = _worker_problems(urls, health, router.url)
    problems += [
        f"the router at {router.url} takes {url} for ill and sends it nothing. Look at that engine's log."
        for url in urls
        if not health.get(url, True)
    ]
    limit, queue = _token(config.router_tokens, "--max-concurrent-requests"), _token(config.router_tokens, "--queue-size")
    in_flight = len(urls) * config.engine.vllm_server_concurrency
    if limit is not None and int(limit) > 0 and int(limit) + int(queue or _ROUTER_QUEUE) < in_flight:
        problems.append(
            f"the router at {router.url} refuses more than {limit} requests and {queue or _ROUTER_QUEUE} waiting ones "
            f"(--router-max-concurrent-requests, --router-queue-size), {len(urls)} engines with --vllm-server-concurrency "
            f"{config.engine.vllm_server_concurrency} have up to {in_flight} in flight. Raise the first, or lower the last."
        )
    if problems or not ask:
        return problems
    adapter = POLICY_ADAPTER if config.lora.adapters_are_synced else None
    try:
        EngineControl(router.url, "", name="the router").prompt_log_probs(_PROBE, SECONDS, adapter)
    except EngineError as error:
        if adapter is None or f"The model `{adapter}` does not exist" not in str(error):  # the first sync will bring it
            return [f"the router at {router.url} does not pass a request on to the engines ({error}). Look at its log."]
    policy, wanted = router.policy(), _token(config.router_tokens, "--policy") or DEFAULT_POLICY
    if policy is not None and policy != wanted:
        source = "--router-policy asks for" if "--policy" in config.router_tokens else "a run without --router-policy expects"
        problems.append(f"the router at {router.url} chooses engines by {policy}, {source} {wanted}. Start it with --policy {wanted}.")
    return problems


def check_router(config: RunConfig, urls: Sequence[str], router: RouterClient) -> None:
    """Whether the router in front of engines that are known already is as `router_disagreements` wants it; EngineError else."""
    _raise_if(router_disagreements(config, urls, router))


def check_workers(urls: Sequence[str], router: RouterClient) -> None:
    """Whether the router still sends to exactly these engines: anyone who reaches its port can add and remove workers."""
    _raise_if(_worker_problems(urls, router.worker_health(), router.url))


def _worker_problems(urls: Sequence[str], known: Collection[str], router: str) -> list[str]:
    missing = [
        f"the router at {router} does not know {url}. Register it there: POST /add_worker?url={url}." for url in urls if url not in known
    ]
    return missing + [
        f"the router at {router} also sends requests to {url}, which is no engine of this run: its weights are not the trainer's. "
        f"Take it out (POST /remove_worker?url={url}), or give the run a router of its own."
        for url in known
        if url not in urls
    ]


def _expectations(config: RunConfig) -> dict[str, _Expected]:
    """What each field of EngineFacts must be; fields that are absent are the engine's own choice."""
    folder = _model_folder(config)
    alone = "Another run controls it: start an engine for this run alone."
    wanted = {
        "model": _Expected(value=str(folder), source="--hf-checkpoint is", cure="Start it with that model."),
        "served_name": _Expected(value=SERVED_NAME, source="hooks ask for", cure=f"Start it with --served-model-name {SERVED_NAME}."),
        "vocab_size": _Expected(
            value=_vocab_size(folder), source=f"{folder}/config.json says", cure="Start it with --hf-checkpoint as it is now."
        ),
        "tensor_parallel_size": _Expected(
            value=config.cluster.rollout_num_gpus_per_engine,
            source="--rollout-num-gpus-per-engine is",
            cure="Start it with that tensor-parallel size.",
        ),
        "world_size": _Expected(
            value=config.cluster.rollout_num_gpus_per_engine,
            source="--rollout-num-gpus-per-engine is",
            cure="Leave pipeline and data parallelism of engines out.",
        ),
        "weight_version": _Expected(value=FRESH_WEIGHTS, source="this run has sent no weights yet and expects", cure=alone),
        "paused": _Expected(value=False, source="this run has not paused it and expects", cure=alone),
        "logprobs_mode": _Expected(
            value="processed_logprobs",
            source="training needs those of the distribution that is sampled from:",
            cure="Leave --vllm-logprobs-mode out.",
        ),
        "generation_config": _Expected(
            value="vllm", source="the sampling flags are to decide alone:", cure="Leave --vllm-generation-config out."
        ),
        "transport": _Expected(
            value=BACKENDS[config.weight_transport], source="the trainer sends over", cure="Leave --vllm-weight-transfer-config out."
        ),
    }
    if config.engine.rollout_external_engine_addrs:  # they may have served a run before: the first sync makes them this run's
        del wanted["weight_version"], wanted["paused"]
    length = config.rollout.rollout_max_context_len
    if length is not None:
        cure = "Start it with that --max-model-len."
        wanted["max_model_len"] = _Expected(value=length, source="--rollout-max-context-len is", cure=cure)
    given = _token(config.vllm_tokens, "--dtype")
    dtype = _DTYPES.get(given, given) if given else ("float32" if config.cluster.device == "cpu" else "bfloat16")
    if dtype is not None:
        source = "--vllm-dtype is" if given else f"--device {config.cluster.device} computes in"
        wanted["dtype"] = _Expected(value=dtype, source=source, cure=f"Start it with --dtype {dtype}.")
    return wanted


def _too_small(config: RunConfig, engine: EngineFacts) -> Iterator[str]:
    """Lengths and numbers of requests that the engine would refuse in the middle of a rollout."""
    rollout = config.rollout
    prompt = rollout.rollout_max_prompt_len or 1
    if rollout.rollout_max_context_len is None and prompt + rollout.rollout_max_response_len > engine.max_model_len:
        yield (
            f"{engine} takes {engine.max_model_len} tokens in all, prompts of {prompt} (--rollout-max-prompt-len) and responses of "
            f"{rollout.rollout_max_response_len} (--rollout-max-response-len) need more. "
            f"Give --rollout-max-context-len {engine.max_model_len}, or a smaller --rollout-max-response-len."
        )
    if 0 <= engine.max_logprobs < rollout.rollout_top_k:
        yield (
            f"{engine} gives the log-probs of {engine.max_logprobs} tokens at most, --rollout-top-k is {rollout.rollout_top_k}: the "
            "trainer needs all that a token was chosen from. Start it with that --max-logprobs."
        )
    if engine.max_requests is not None and engine.max_requests < config.engine.vllm_server_concurrency:
        yield (
            f"{engine} refuses more than {engine.max_requests} requests at a time, --vllm-server-concurrency is "
            f"{config.engine.vllm_server_concurrency}. Lower it, or raise --vllm-max-num-queued-reqs."
        )


def _model_folder(config: RunConfig) -> Path:
    if config.model.hf_checkpoint is None:
        raise ConfigError("An engine needs a model: give --hf-checkpoint FOLDER.")
    return Path(config.model.hf_checkpoint)


def _vocab_size(folder: Path) -> int:
    """Entries of the vocabulary, from config.json; of models with several modalities, the text's."""
    try:
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return int(model.get("text_config", model)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder}/config.json does not tell the vocabulary's size ({error!r}): give a complete model folder."
        ) from error


def _token(tokens: Sequence[str], flag: str) -> str | None:
    """The value of a flag among raw tokens; the last one wins."""
    found = None
    for index, token in enumerate(tokens):
        name, equals, value = token.partition("=")
        if name.replace("_", "-") == flag:
            found = value if equals else next(iter(tokens[index + 1 : index + 2]), None)
    return found


def _words(field: str) -> str:
    return {"vllm": "the version of vLLM", "served_name": "the served name", "paused": "'paused'"}.get(field, field.replace("_", " "))


def _shown(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


def _raise_if(problems: Any) -> None:
    listed = list(problems)
    if listed:
        numbered = listed if len(listed) == 1 else [f"{number}. {text}" for number, text in enumerate(listed, 1)]
        raise EngineError("engines, router and configuration disagree.\n" + "\n".join(numbered))
