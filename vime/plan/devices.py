"""What machines hold, and what programs take before a model is in them: the numbers of a plan that no formula gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["GIB", "GPUS", "MIB", "PROGRAMS_CPU", "PROGRAMS_GPU", "Machine", "Programs"]

MIB, GIB = 2**20, 2**30

# GiB that a program can see: the makers' GB, less what the driver keeps. --device-memory says what yours has.
GPUS: Mapping[str, float] = MappingProxyType({
    "H200": 139.8, "H100": 79.2, "H20": 95.6, "GH200": 94.5, "B200": 178.4, "B300": 268.0, "A100": 79.2, "A100-40": 39.4, "A800": 79.2,
    "L40S": 44.4, "L4": 22.0, "A10": 22.0, "RTX4090": 23.5, "RTX5090": 31.4, "MI300X": 191.0,
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One node, and how fast weights travel."""

    device: str  # "cpu", or a GPU's name
    device_bytes: int  # of one GPU; on a CPU the whole memory of the machine, which all processes share
    host_bytes: int | None  # None = not known and not checked
    shm_bytes: int | None = None  # of /dev/shm; None = not known and not checked
    gpus_per_node: int
    sync_bytes_per_s: float  # of the weight sync's transfer, into each engine
    sync_overhead_s: float  # of one sync whatever its size: pause, start, finish, resume, proof


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Bytes that each process takes with an empty model."""

    driver: int
    ray: int  # Ray's own processes on a node, its idle workers included
    manager: int  # RolloutManager
    router: int
    trainer: int  # host memory
    engine: int  # host memory: API server, engine core, one worker, and the Ray actor that owns them
    engine_worker: int  # each further worker of an engine
    trainer_device: int  # GPU memory: CUDA context and communicators
    engine_device: int


# Private memory of each process of the quickstart on Linux x86-64 with the locked versions (torch 2.13, vLLM 0.32, Ray 2.60), read from
# /proc/PID/smaps_rollup during its run on a machine of two cores; the engine's without its 1 GiB of KV cache. Pages of the libraries
# that several processes share are counted once, with the driver (400 MiB).
PROGRAMS_CPU = Programs(
    driver=795 * MIB,
    ray=295 * MIB,
    manager=475 * MIB,
    router=80 * MIB,
    trainer=480 * MIB,
    engine=1950 * MIB,
    engine_worker=770 * MIB,
    trainer_device=0,
    engine_device=0,
)

# Not measured here: a CUDA context of about 0.5 GiB and NCCL's buffers; host memory of processes that have loaded CUDA's libraries.
PROGRAMS_GPU = Programs(
    driver=GIB,
    ray=GIB,
    manager=GIB,
    router=MIB * 64,
    trainer=4 * GIB,
    engine=6 * GIB,
    engine_worker=3 * GIB,
    trainer_device=int(1.5 * GIB),
    engine_device=int(1.0 * GIB),
)
