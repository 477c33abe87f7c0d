"""Hooks of a run whose engines fail, once: an actor's that is killed, and a frozen judge's that is stopped."""

import asyncio
import os
import signal
import time
from pathlib import Path

from vime.rollout.vllm_rollout import generate
from vime.utils.http_utils import get, get_model_url, post

FAULTY_STEP_FIRST_INDEX = 16  # of the second step, with 16 samples a step
SECONDS = 400.0


def servers():
    """Model folder -> the API server of the engine of this run that serves it; servers are of the run by its mark."""
    mark = f"VIME_TEST_RUN={os.environ['VIME_TEST_RUN']}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = mark in (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if ours and words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]:
            found[words[words.index("--model") + 1]] = int(folder.name)
    return found


async def workers(args):
    """The engines behind both routers."""
    return {url for name in ("policy", "judge") for url in (await get(get_model_url(args, name, "/list_workers")))["urls"]}


async def replaced(args, before):
    """Wait until as many engines serve, and none of them is of those before."""
    end = time.monotonic() + SECONDS
    while True:
        now = await workers(args)
        if len(now) == len(before) and not now & before:
            return
        assert time.monotonic() < end, f"no replacement within {SECONDS} s: {before} -> {now}"
        await asyncio.sleep(0.2)  # looking at another process


async def generate_and_fail(args, sample, sampling_params):
    """In the second step both engines fail before the step's samples are asked for."""
    if sample.index == FAULTY_STEP_FIRST_INDEX:
        before = await workers(args)
        found = servers()
        os.kill(found.pop(args.hf_checkpoint), signal.SIGKILL)
        os.kill(found.popitem()[1], signal.SIGSTOP)
        sample = await generate(args, sample, sampling_params)  # answered by who comes after it
        await replaced(args, before)
        return sample
    return await generate(args, sample, sampling_params)


async def judged(args, sample, **kwargs):
    """The judge's probability of its own likeliest continuation of the sample, which no training moves."""
    params = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "detokenize": False}
    answer = await post(get_model_url(args, "judge"), {"token_ids": sample.tokens, "sampling_params": params})
    choice = answer["choices"][0]
    assert choice["weight_versions"][0]["version"] == "default"  # it is sent no weights
    return choice["logprobs"]["content"][0]["logprob"]
