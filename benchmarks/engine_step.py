"""The generating part of a quickstart step, without anything around it: what the engine and HTTP leave to be had.

    .venv/bin/python -m benchmarks.engine_step [--engine-threads 1] [-- --max-num-seqs 512]

One engine and one router, as in a run; the step's prompts, one request a sample (as the rollout sends them) or one a group,
through the router or straight to the engine; and the default rollout function whole, rewards and samples included (`--profile`
says where its Python spends its time). Flags after `--` go to the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.machine import describe_machine, wait_quiet
from benchmarks.workload import ROOT, Assets, Workload, add_arguments, flag_value, from_arguments, spread, write_result
from vime.backends.vllm_utils.router import RouterServer
from vime.backends.vllm_utils.server import EngineServer
from vime.config import RunConfig
from vime.config import sections as s
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.engine_client import ENDPOINT, EngineClient, engine_sampling_params, parse_reply
from vime.rollout.vllm_rollout import generate_rollout
from vime.utils.http_utils import HttpScope, RequestLimit, RetryPolicy, request_json

__all__ = ["measure"]

START_SECONDS = 300.0
Send = Callable[[EngineClient, list[int], dict[str, Any]], Awaitable[int]]


async def one_a_sample(client: EngineClient, prompt: list[int], params: dict[str, Any]) -> int:
    """A group as the rollout asks for it; returns the number of generated tokens."""
    single = {name: value for name, value in params.items() if name != "n"}
    replies = await asyncio.gather(*(client.generate(prompt, single) for _ in range(params["n"])))
    return sum(len(reply.token_ids) for reply in replies)


async def one_a_group(client: EngineClient, prompt: list[int], params: dict[str, Any]) -> int:
    """A group in one request; returns the number of generated tokens."""
    payload = {"token_ids": prompt, "sampling_params": engine_sampling_params(params)}
    async with client.scope.slot(client.url):
        reply = await request_json(client.scope.open(), "POST", client.url, payload, policy=client.scope.policy)
    return sum(len(parse_reply({"choices": [choice]}, client.url).token_ids) for choice in reply["choices"])


async def steps(url: str, send: Send, prompts: list[list[int]], workload: Workload) -> tuple[list[float], int]:
    """Seconds of each measured step, and the tokens generated in them."""
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": workload.max_new_tokens, "n": workload.group}
    scope = HttpScope(base_url=url, limit=RequestLimit(512), policy=RetryPolicy(timeout=300.0))
    client = EngineClient(scope)
    assert client.url == url + ENDPOINT
    seconds, tokens = [], 0
    try:
        for number in range(workload.steps):
            part = [prompts[(number * workload.prompts + i) % len(prompts)] for i in range(workload.prompts)]
            begun = time.perf_counter()
            counts = await asyncio.gather(*(send(client, prompt, params) for prompt in part))
            if number >= workload.warmup:
                seconds.append(time.perf_counter() - begun)
                tokens += sum(counts)
    finally:
        await scope.close()
    return seconds, tokens


def rollout_steps(config: RunConfig, router: RouterServer, workload: Workload, profile: bool) -> tuple[list[float], int]:
    """The same with `generate_rollout`: prompts encoded, answers scored, samples made."""
    args = config.runtime_args(vllm_router_ip=router.host, vllm_router_port=router.port, num_engines=1)
    source = RolloutDataSourceWithBuffer(args)
    profiler = cProfile.Profile() if profile else None
    seconds, tokens = [], 0
    try:
        for number in range(workload.steps):
            if profiler and number == workload.warmup:
                profiler.enable()
            begun = time.perf_counter()
            output = generate_rollout(args, number, source)
            if number >= workload.warmup:
                seconds.append(time.perf_counter() - begun)
                tokens += int(output.metrics["rollout/total_tokens"])
    finally:
        source.close()
    if profiler:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    return seconds, tokens


def run_config(workload: Workload, assets: Assets, engine_flags: list[str]) -> RunConfig:
    """As much of a run's configuration as engine and rollout look at."""
    return RunConfig(
        model=s.ModelConfig(hf_checkpoint=str(assets.model.resolve())),
        data=s.DataConfig(
            prompt_data=str(assets.prompts.resolve()),
            label_key="label",
            apply_chat_template=True,
            rollout_batch_size=workload.prompts,
            n_samples_per_prompt=workload.group,
        ),
        rollout=s.RolloutConfig(
            rollout_max_context_len=max(48, 40 + workload.max_new_tokens),
            rollout_max_response_len=workload.max_new_tokens,
            rollout_skip_special_tokens=True,
        ),
        reward=s.RewardConfig(custom_rm_path=flag_value("--custom-rm-path", "examples.quickstart.reward.verified")),
        vllm_tokens=tuple(engine_flags),
    )


def measure(workload: Workload, assets: Assets, threads: int, engine_flags: list[str], *, profile: bool) -> dict[str, Any]:
    """Seconds a step and samples per second of each way of asking. Raises what the engine's start raises."""
    tokenizer: Any = AutoTokenizer.from_pretrained(assets.model)
    rows = [json.loads(line) for line in assets.prompts.read_text(encoding="utf-8").splitlines()]
    rendered = [tokenizer.apply_chat_template(row["input"], add_generation_prompt=True, return_dict=True) for row in rows]
    prompts = [list(one["input_ids"]) for one in rendered]
    config = run_config(workload, assets, engine_flags)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="vime-bench-engine-") as folder:
        logs = Path(folder)
        begun = time.perf_counter()
        engine = EngineServer(config, index=0, log_path=logs / "engine.log", run_id="bench", extra_env={"OMP_NUM_THREADS": str(threads)})
        try:
            url = engine.wait_healthy(START_SECONDS).url
            found["engine_start_seconds"] = round(time.perf_counter() - begun, 1)
            router = RouterServer([url], log_path=logs / "router.log")
            try:
                router.wait_ready(60.0)
                seconds, tokens = rollout_steps(config, router, workload, profile)
                found["rollout function"] = _figures(workload, seconds, tokens)
                print(f"rollout function: {found['rollout function']}", file=sys.stderr, flush=True)
                for where, base in (("router", router.url), ("direct", url)):
                    for how, send in (("one request a sample", one_a_sample), ("one request a group", one_a_group)):
                        seconds, tokens = asyncio.run(steps(base, send, prompts, workload))
                        found[f"{how}, {where}"] = _figures(workload, seconds, tokens)
                        print(f"{how}, {where}: {found[f'{how}, {where}']}", file=sys.stderr, flush=True)
            finally:
                router.stop()
        finally:
            engine.stop()
    return found


def _figures(workload: Workload, seconds: list[float], tokens: int) -> dict[str, Any]:
    return {
        "step_seconds": spread(seconds),
        "samples_per_second": spread([workload.samples / value for value in seconds]),
        "response_tokens_mean": round(tokens / (workload.samples * len(seconds)), 2),
    }


def main() -> None:
    """Command line."""
    own, engine_flags = sys.argv[1:], []
    if "--" in own:
        cut = own.index("--")
        own, engine_flags = own[:cut], own[cut + 1 :]
    parser = argparse.ArgumentParser(description="Samples per second of one engine on the quickstart's prompts.")
    parser.add_argument("--name", default="engine_step", help="write results/NAME.json (default: %(default)s)")
    parser.add_argument("--engine-threads", type=int, default=1, help="OMP threads of the engine's worker (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="print where the rollout function spends its time")
    add_arguments(parser)
    arguments = parser.parse_args(own)
    workload, assets = from_arguments(arguments)
    machine = describe_machine() | {"busy_cores": wait_quiet(60.0)}
    found = measure(workload, assets, arguments.engine_threads, engine_flags, profile=arguments.profile)
    result = {"machine": machine, "workload": workload.as_dict(), "engine_threads": arguments.engine_threads}
    result |= {"engine_flags": engine_flags, "found": found}
    print(json.dumps(result, indent=2))
    print(f"written: {write_result(arguments.name, result).relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
