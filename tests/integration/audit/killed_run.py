"""A run whose driver and rollout manager are killed (SIGKILL) at random lines of their code, resumed each time, and audited each time.

    python -m tests.integration.audit.killed_run FOLDER KILLS SEED STALENESS

The loop, the record, the manager with its data source, buffer, filters and ledger, and the commits are the real ones; in one process,
without engines, with a trainer that does nothing, a generate function that answers at once and, in the place of Ray's object store,
the batch itself. With STALENESS > 0 groups are generated ahead, so that commits hold groups that are out.
Each life is forked from this process, which has imported everything. Prints JSON: what each life came to.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import traceback
from dataclasses import fields
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import vime.ray.rollout
from vime.audit.report import as_text, audit
from vime.cli.record import RunRecord
from vime.cli.train import find_start
from vime.config import SECTIONS, RunConfig
from vime.data.tokenizer import load_tokenizer
from vime.errors import GenerationError
from vime.loop import run_loop
from vime.ray.rollout import RolloutManager
from vime.rollout.filter_hub.base_types import DynamicFilterOutput
from vime.types import WeightSyncReport
from vime.utils.types import Sample

HERE = "tests.integration.audit.killed_run"
KILLED_IN = (  # files of the package whose lines count
    "rollout/ledger.py", "rollout/tracking.py", "rollout/data_source.py", "rollout/buffer.py", "rollout/collect.py",
    "rollout/continuous.py", "rollout/producer.py", "ray/rollout.py",
    "checkpoint.py", "loop.py", "cli/record.py", "observability/metrics.py",
)  # fmt: skip
LINES_OF_A_LIFE = 16_000  # at most, before it is killed: about five steps
STEPS_AT_THE_END = 6  # of the last life, which is not killed
FILTERED, FAILING, FANNED = 5, 7, 3  # prompts with numbers divisible by these


def number_of(sample: Sample) -> int:
    """The number in a prompt."""
    return int(str(sample.prompt).removeprefix("n"))


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    """Answers at once, but not all in the same turn of the loop; fails, or fans out, as the prompt says."""
    for _ in range((sample.index or 0) % 3):
        await asyncio.sleep(0)
    if number_of(sample) % FAILING == 0:
        raise GenerationError("this prompt always fails")
    sample.tokens = [1, 2]
    versions = [str(args.engine_access.version)] * 2
    sample.append_response_tokens(tokens=[3, 4], log_probs=[-0.5, -0.25], weight_versions=versions, status=Sample.Status.COMPLETED)
    if number_of(sample) % FANNED:
        return sample
    sample.rollout_id = sample.index
    return [sample, Sample.from_dict(sample.to_dict())]


async def reward(args: Any, sample: Sample) -> float:
    """Anything."""
    return float((sample.index or 0) % 2)


def keep(args: Any, group: list[Sample]) -> DynamicFilterOutput:
    """Drops what the prompt says."""
    return DynamicFilterOutput(keep=number_of(group[0]) % FILTERED != 0, reason="divisible")


class Direct:
    """The loop's side of the manager, without an actor between them."""

    has_engines = True  # so that weight versions go up

    def __init__(self, manager: RolloutManager) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def endpoints(self) -> list[Any]:
        return []


class Trainer:
    """Trains at once."""

    def train(self, batch_refs: list[Any]) -> dict[str, float]:
        return {}

    def update_weights(self, version: int, engines: list[Any]) -> WeightSyncReport:
        return WeightSyncReport(version=version, num_bytes=1, seconds=1.0, num_tensors=1)

    def writers(self) -> dict[str, Any]:
        return {}


def config_of(folder: Path, staleness: int) -> RunConfig:
    """The run's flags."""
    flags: dict[str, Any] = {
        "hf_checkpoint": str(folder / "model"),
        "prompt_data": str(folder / "prompts.jsonl"),
        "rollout_max_prompt_len": 4,
        "bad_row_policy": "skip",
        "rollout_batch_size": 4,
        "over_sampling_batch_size": 5,
        "n_samples_per_prompt": 2,
        "custom_generate_function_path": f"{HERE}.generate",
        "custom_rm_path": f"{HERE}.reward",
        "dynamic_sampling_filter_path": f"{HERE}.keep",
        "max_weight_staleness": staleness,
        "save_debug_rollout_data": str(folder / "batches" / "{rollout_id}.jsonl"),
        "save": str(folder / "run"),
        "save_interval": 2,
        "keep_checkpoints": 2,
    }
    home = {f.name: section for section, cls in SECTIONS.items() for f in fields(cls)}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in flags.items():
        sections.setdefault(home[name], {})[name] = value
    return RunConfig(**{section: SECTIONS[section](**values) for section, values in sections.items()})


def live(config: RunConfig, folder: Path, steps: int | None) -> None:
    """One life: from the newest commit on, for `steps` steps beyond it, or without end."""
    run = folder / "run"
    run.mkdir(exist_ok=True)
    commit = find_start(config)
    first = 0 if commit is None else commit.rollout_id + 1
    manager = RolloutManager(config, str(run), str(folder / "logs"))
    manager._args = config.runtime_args(**manager._args._runtime | {"vllm_router_ip": "127.0.0.1", "vllm_router_port": 1})  # no router runs
    vime.ray.rollout.ray = SimpleNamespace(put=lambda batch: batch)  # type: ignore[attr-defined]
    manager.init(str(commit.rollout) if commit else None)
    last = first + steps if steps is not None else 1 << 30
    record = RunRecord(config, run, first_step=first, num_steps=last)
    run_loop(first, last, Direct(manager), Trainer(), record)
    record.close()
    manager.stop()


def die_at_line(count: int) -> None:
    """Kill this process when it comes to the `count`-th line of the code that KILLED_IN names."""
    root = str(Path(vime.ray.rollout.__file__).parents[1]) + os.sep
    places = tuple(root + name for name in KILLED_IN)
    monitoring = sys.monitoring
    monitoring.use_tool_id(monitoring.DEBUGGER_ID, "killer")
    left = count

    def on_line(code: CodeType, line: int) -> Any:
        nonlocal left
        if not code.co_filename.startswith(places):
            return monitoring.DISABLE
        left -= 1
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return None

    monitoring.register_callback(monitoring.DEBUGGER_ID, monitoring.events.LINE, on_line)
    monitoring.set_events(monitoring.DEBUGGER_ID, monitoring.events.LINE)


def fork_life(config: RunConfig, folder: Path, *, kill_at: int | None, steps: int | None) -> int:
    """Run one life in a process of its own; its exit code (below zero: the signal)."""
    child = os.fork()
    if child == 0:
        try:
            if kill_at is not None:
                die_at_line(kill_at)
            live(config, folder, steps)
            os._exit(0)
        except Exception:  # noqa: BLE001 - told by the process that waits
            (folder / "error.txt").write_text(traceback.format_exc())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    folder, kills, seed, staleness = Path(sys.argv[1]), *map(int, sys.argv[2:])
    config = config_of(folder, staleness)
    load_tokenizer(str(folder / "model"))  # for what it imports
    random_ = random.Random(seed)
    lives = []
    for number in range(kills + 1):
        kill_at = random_.randrange(1, LINES_OF_A_LIFE) if number < kills else None
        code = fork_life(config, folder, kill_at=kill_at, steps=None if kill_at else STEPS_AT_THE_END)
        report = None
        if (folder / "run" / "ledger.sqlite").exists():
            report = audit(folder / "run")
        error = (folder / "error.txt").read_text() if (folder / "error.txt").exists() else None
        lives.append(
            {
                "kill_at": kill_at,
                "code": code,
                "error": error,
                "findings": [str(finding) for finding in report.findings] if report else [],
                "last_step": report.last_step if report else None,
            }
        )
    text = as_text(report) if report else ""
    (folder / "lives.json").write_text(json.dumps({"lives": lives, "text": text}))


if __name__ == "__main__":
    main()
