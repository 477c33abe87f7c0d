"""A generate function that makes the run's engines fail, once, and waits until others serve in their place."""

import asyncio
import os
import signal
import time
from pathlib import Path

from vime.rollout.vllm_rollout import generate
from vime.utils.http_utils import get

FAULTY_STEP_FIRST_INDEX = 16  # of the second step, with 16 samples a step
SECONDS = 200.0


def servers():
    """The API servers of this run's engines: they are of the run by its mark, and start as python -m MODULE."""
    mark = f"VIME_TEST_RUN={os.environ['VIME_TEST_RUN']}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = mark in (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if ours and words[1:3] == [b"-m", b"vllm.entrypoints.openai.api_server"]:
            found.append(int(folder.name))
    return sorted(found)


async def workers(args):
    url = f"http://{args.vllm_router_ip}:{args.vllm_router_port}/list_workers"
    return set((await get(url))["urls"])


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
    """In the second step one engine is killed and the other stopped, before the step's samples are asked for."""
    if sample.index == FAULTY_STEP_FIRST_INDEX:
        before = await workers(args)
        first, second = servers()
        os.kill(first, signal.SIGKILL)
        os.kill(second, signal.SIGSTOP)
        sample = await generate(args, sample, sampling_params)  # answered by who comes after them
        await replaced(args, before)
        return sample
    return await generate(args, sample, sampling_params)
