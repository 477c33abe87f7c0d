"""What the ledger costs a step: its data source with and without it, on groups that need no generating.

    python -m benchmarks.ledger [--groups 32] [--samples 8] [--steps 100]

Prints JSON: processor time of the thread per step (get_samples, trained, metrics) with the ledger less that without, in
milliseconds; and the ledger's size per step in bytes, once its write-ahead log is folded in.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from examples.quickstart.make_assets import AssetSpec, make_assets
from vime.config import RunConfig
from vime.config.sections import DataConfig, ModelConfig
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.tracking import TrackedSource
from vime.utils.types import Sample

TOKENS = 256  # of a response


def step_times(source: Any, groups: int, steps: int) -> list[float]:
    """Milliseconds of processor time that each step takes in the source."""
    times = []
    for step in range(steps):
        begun = time.thread_time()
        if isinstance(source, TrackedSource):
            source.begin_step(step, trained_through=step - 1)
        samples = [sample for group in source.get_samples(groups) for sample in group]
        spent = time.thread_time() - begun
        for sample in samples:
            sample.append_response_tokens(tokens=[1] * TOKENS, log_probs=[-0.5] * TOKENS, weight_versions=[str(step)] * TOKENS)
            sample.status = Sample.Status.COMPLETED
        begun = time.thread_time()
        if isinstance(source, TrackedSource):
            source.trained(samples, step)
        source.metrics()
        times.append(1e3 * (spent + time.thread_time() - begun))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assets = make_assets(folder / "assets", AssetSpec())
        data = DataConfig(prompt_data=str(assets["train"]), n_samples_per_prompt=given.samples, apply_chat_template=True)
        args = RunConfig(model=ModelConfig(hf_checkpoint=str(assets["model"])), data=data).args
        bare = step_times(RolloutDataSourceWithBuffer(args), given.groups, given.steps)
        source = TrackedSource(RolloutDataSourceWithBuffer(args), data.data_source_path, run_dir=folder, log_dir=folder, load=None)
        tracked = step_times(source, given.groups, given.steps)
        source.close()
        size = (folder / "ledger.sqlite").stat().st_size
    figures = {
        "ms_per_step_without": round(statistics.median(bare), 2),
        "ms_per_step_with": round(statistics.median(tracked), 2),
        "spread_with": [round(min(tracked), 2), round(max(tracked), 2)],
        "bytes_per_step": size // given.steps,
    }
    print(json.dumps({"groups": given.groups, "samples": given.samples, **figures, "machine": describe_machine()}))


if __name__ == "__main__":
    main()
