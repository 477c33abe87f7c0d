"""The step that both sides of the comparison run: the quickstart's model, prompts, lengths, group size and optimizer.

The numbers are read from the quickstart's own command line (examples/quickstart/recipe.py), so they follow it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from examples.quickstart import make_assets, recipe

__all__ = [
    "RESULTS",
    "ROOT",
    "RUNS",
    "Assets",
    "Workload",
    "add_arguments",
    "flag_value",
    "from_arguments",
    "limited_threads",
    "prepare_assets",
    "spread",
    "write_result",
]

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "bench"  # everything a benchmark makes, not kept in git
RESULTS = ROOT / "benchmarks" / "results"


_FLAGS = tuple(recipe.grpo_flags(Path()))


def flag_value(flag: str, default: str, flags: Sequence[str] = _FLAGS) -> str:
    """The value of one of the quickstart's flags; `default` is what the flag is when it is not given."""
    return flags[flags.index(flag) + 1] if flag in flags else default


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One rollout step: `prompts` x `group` samples, then `minibatches` optimizer steps over them."""

    prompts: int = int(flag_value("--rollout-batch-size", "64"))  # prompts of a rollout step
    group: int = int(flag_value("--n-samples-per-prompt", "1"))  # samples of a prompt
    max_new_tokens: int = int(flag_value("--rollout-max-response-len", "1024"))  # longest response, in tokens
    minibatch: int = int(flag_value("--global-batch-size", str(prompts * group)))  # samples of one optimizer step
    learning_rate: float = float(flag_value("--lr", "1e-6"))
    adam_beta2: float = float(flag_value("--adam-beta2", "0.999"))
    weight_decay: float = float(flag_value("--weight-decay", "0.01"))
    clip_grad: float = float(flag_value("--clip-grad", "1.0"))
    seed: int = 7
    threads: int = 2  # cores that a side may use
    warmup: int = 2  # rollout steps before the measurement
    measured: int = 12  # rollout steps measured

    @property
    def samples(self) -> int:
        """Samples of a rollout step."""
        return self.prompts * self.group

    @property
    def minibatches(self) -> int:
        """Optimizer steps of a rollout step."""
        return self.samples // self.minibatch

    @property
    def steps(self) -> int:
        """Rollout steps of a run."""
        return self.warmup + self.measured

    def as_dict(self) -> dict[str, Any]:
        """Its fields, for a result file."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assets:
    """Paths of what both sides read."""

    model: Path  # Hugging Face folder, after the supervised start
    prompts: Path  # train.jsonl: input, label, metadata


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags for each field of `Workload` (names as there), and --model and --prompt-data to take the place of the assets."""
    for field in fields(Workload):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default, help="default: %(default)s"
        )
    parser.add_argument(
        "--model", type=Path, help="Hugging Face folder to start from (default: made, with the quickstart's supervised start)"
    )
    parser.add_argument("--prompt-data", type=Path, help="prompt file, with columns as in the quickstart's train.jsonl (default: made)")


def from_arguments(arguments: argparse.Namespace) -> tuple[Workload, Assets]:
    """The workload of a command line, and its assets, made when they are not there yet."""
    workload = Workload(**{field.name: getattr(arguments, field.name) for field in fields(Workload)})
    if workload.samples % workload.minibatch:
        raise SystemExit(f"--minibatch {workload.minibatch} does not divide {workload.samples} samples. Give a divisor.")
    if arguments.model is not None and arguments.prompt_data is not None:
        return workload, Assets(model=arguments.model, prompts=arguments.prompt_data)
    made = prepare_assets()
    return workload, Assets(model=arguments.model or made.model, prompts=arguments.prompt_data or made.prompts)


def prepare_assets() -> Assets:
    """The quickstart's model and task files, and the model after a supervised start; made once per version of what makes them.

    The start matters for the lengths: a model with random weights never ends its answer before the token limit, while the
    quickstart's answers are two to four tokens, as in any run that is worth its time.
    """
    makers = (Path(make_assets.__file__), ROOT / "benchmarks" / "warm_start.py")
    recipe_of_start = " ".join(recipe.sft_flags(Path())).encode()
    key = hashlib.sha256(b"".join([*(path.read_bytes() for path in makers), recipe_of_start])).hexdigest()[:12]
    folder = RUNS / f"assets-{key}"
    assets = Assets(model=folder / "warm", prompts=folder / "train.jsonl")
    if not assets.prompts.exists():
        _module("examples.quickstart.make_assets", str(folder))
    if not (assets.model / "model.safetensors").exists():
        _module("benchmarks.warm_start", str(folder / "model"), str(folder / "sft.jsonl"), str(assets.model))
    return assets


def _module(name: str, *arguments: str) -> None:
    """Run a module of the repository in its own process, so that this one stays small."""
    subprocess.run([sys.executable, "-m", name, *arguments], cwd=ROOT, check=True, stdout=sys.stderr, env=limited_threads(2))


def limited_threads(threads: int) -> dict[str, str]:
    """This process's environment, with `threads` OpenMP threads and no hub or telemetry."""
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most of some measurements, to four digits."""
    return {name: float(f"{pick(values):.4g}") for name, pick in (("median", statistics.median), ("min", min), ("max", max))}


def write_result(name: str, record: dict[str, Any]) -> Path:
    """Write benchmarks/results/<name>.json."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path
