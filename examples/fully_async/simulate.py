"""How much asynchronous training saves at sizes that do not run here: engines and trainer are waits, everything between them is real.

    python -m examples.fully_async.simulate [--groups 16] [--samples 8] [--train 4] [--steps 24] [--faster 10]

A sample takes the seconds of `latencies.json`, a training step --train seconds, a weight sync none. Data source, collectors, producer,
bound and stale policy are those of a run. All waits are divided by --faster; printed seconds are multiplied by it again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from examples.fully_async.task import latency
from examples.quickstart.make_assets import AssetSpec, make_assets
from vime.config import RunConfig
from vime.config import sections as s
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.engine_access import EngineAccess
from vime.rollout.producer import GroupProducer
from vime.rollout.vllm_rollout import generate_rollout
from vime.utils.types import Sample

__all__ = ["simulated", "steps_per_second"]

WARM_UP = 4  # steps that are not measured


async def simulated(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """--custom-generate-function-path: two tokens, after the sample's seconds."""
    access: EngineAccess = args.engine_access
    version = str(access.version)
    await asyncio.sleep(latency(sample.index or 0) / float(args.run_dir))  # `run_dir` carries the factor
    sample.tokens = sample.tokens or [1]
    sample.append_response_tokens(tokens=[2, 3], log_probs=[-0.5, -0.5], weight_versions=[version] * 2, status=Sample.Status.COMPLETED)
    sample.reward = float((sample.index or 0) % 2)
    return sample


def steps_per_second(
    model: Path, data: Path, *, groups: int, samples: int, train: float, steps: int, faster: float, staleness: int
) -> float:
    """Training steps a (simulated) second, the first WARM_UP left out."""
    config = RunConfig(
        model=s.ModelConfig(hf_checkpoint=str(model)),
        data=s.DataConfig(prompt_data=str(data), label_key="label", rollout_batch_size=groups, n_samples_per_prompt=samples),
        rollout=s.RolloutConfig(custom_generate_function_path=f"{__spec__.name}.simulated", max_weight_staleness=staleness),
    )
    access = EngineAccess()
    access.version = 0
    where = {"vllm_router_ip": "127.0.0.1", "vllm_router_port": 1, "num_engines": 1}
    args = config.runtime_args(run_dir=str(faster), engine_access=access, **where)
    source = RolloutDataSourceWithBuffer(args)
    producer = None
    if staleness:
        producer = GroupProducer(args, source, first_step=0, num_steps=steps + WARM_UP, bound=staleness, version=0)
        producer.resume(0)
    begun = time.monotonic()
    for step in range(steps + WARM_UP):
        if step == WARM_UP:
            begun = time.monotonic()
        producer.take(step) if producer else generate_rollout(args, step, source)
        time.sleep(train / faster)
        access.version = step + 1
        if producer:
            producer.resume(step + 1)
    seconds = (time.monotonic() - begun) * faster
    if producer:
        producer.close()
    source.close()
    return steps / seconds


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m examples.fully_async.simulate", description="Staleness against speed, simulated.")
    for name, default, text in (
        ("groups", 16, "prompts of a step"),
        ("samples", 8, "answers of a prompt"),
        ("steps", 24, "measured steps"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--train", type=float, default=4.0, help="seconds of a training step (default: %(default)s)")
    parser.add_argument("--faster", type=float, default=10.0, help="what all waits are divided by (default: %(default)s)")
    given = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        paths = make_assets(Path(folder), AssetSpec(num_train=2000, num_sft=1, num_heldout=1))
        print("staleness bound    seconds a step    speed")
        first = 0.0
        for staleness in (0, 1, 2, 4, 8):
            rate = steps_per_second(paths["model"], paths["train"], staleness=staleness, **given)
            first = first or rate
            print(f"{staleness:>15}{1 / rate:>18.2f}{rate / first:>8.2f}x", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
