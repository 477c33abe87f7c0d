"""A long-tailed task: an answer comes from the engine, then a tool takes its time. Most are quick, a few take many times longer.

The seconds are those of `latencies.json`: a fixed, made-up list (log-normal, median 1 s, longest 9 s; `write_latencies` makes it). A sample
gets its own by its id, so that runs that differ in nothing but their staleness wait for the same.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from functools import cache
from pathlib import Path
from typing import Any

from vime.rollout.vllm_rollout import generate
from vime.utils.types import Sample

__all__ = ["LATENCIES", "latency", "share_of_digits", "with_slow_tool", "write_latencies"]

LATENCIES = Path(__file__).parent / "latencies.json"
COUNT, SPREAD, LONGEST, SEED = 512, 0.9, 9.0, 11


def write_latencies(path: Path = LATENCIES) -> None:
    """Make the list: COUNT draws of exp(N(0, SPREAD²)) seconds, LONGEST at most."""
    generator = random.Random(SEED)
    drawn = [min(math.exp(generator.gauss(0.0, SPREAD)), LONGEST) for _ in range(COUNT)]
    path.write_text(json.dumps([round(seconds, 3) for seconds in drawn]) + "\n", encoding="utf-8")


@cache
def _recorded() -> tuple[float, ...]:
    return tuple(json.loads(LATENCIES.read_text(encoding="utf-8")))


def latency(sample_index: int) -> float:
    """Seconds that the tool takes for this sample."""
    return _recorded()[sample_index % COUNT]


async def share_of_digits(args: Any, sample: Sample, **kwargs: Any) -> float:
    """--custom-rm-path: the share of digits among the response's characters; a model with random weights learns that."""
    text = sample.response.strip()
    return sum(letter.isdigit() for letter in text) / len(text) if text else 0.0


async def with_slow_tool(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """--custom-generate-function-path: the engine's answer, then the tool. No request slot is held while the tool works."""
    sample = await generate(args, sample, sampling_params)
    begun = time.monotonic()
    await asyncio.sleep(latency(sample.index or 0))  # what stands for a compiler, a browser, a test suite
    sample.non_generation_time += time.monotonic() - begun
    return sample
