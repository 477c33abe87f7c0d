"""The only door to Megatron: device, dtype and backend decided once; process groups, seeds and threads set up."""

from __future__ import annotations

import importlib.util
import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vime.backends.megatron_utils import cpu_activate
from vime.backends.megatron_utils.layout import Layout
from vime.config.sections import ClusterConfig, TrainingConfig
from vime.errors import ConfigError, DeadlineError, ResourceError, TrainerError

__all__ = ["Platform", "import_megatron", "init_distributed", "init_parallel", "platform", "set_threads", "shutdown", "watch_peers"]

log = logging.getLogger(__name__)
MEGATRON_VERSION = "0.19."
PEER_FAILURES = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "Timed out waiting", "Broken pipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """Where and in what the trainer computes."""

    device: torch.device
    dtype: torch.dtype  # of the parameters
    backend: str  # of torch.distributed

    @property
    def is_cpu(self) -> bool:
        """No accelerator."""
        return self.device.type == "cpu"

    def facts(self) -> dict[str, Any]:
        """What results depend on in their last bits, as plain values."""
        name = "cpu" if self.is_cpu else torch.cuda.get_device_name(self.device)
        dtype = str(self.dtype).removeprefix("torch.")
        return {"device": name, "dtype": dtype, "threads": torch.get_num_threads(), "torch": torch.__version__}


def import_megatron() -> ModuleType:
    """Import `megatron.core`, behind the CPU layer where that is needed, and check its version."""
    import megatron.core

    if not megatron.core.__version__.startswith(MEGATRON_VERSION):
        raise ConfigError(f"megatron-core {megatron.core.__version__} is installed; vime needs {MEGATRON_VERSION}x. Run `make setup`.")
    if importlib.util.find_spec("psutil") is None:  # Megatron does not declare it, and saves in a child process that dies without it
        raise ConfigError("psutil is not installed: Megatron's checkpoints would wait forever without it. Run `make setup`.")
    return megatron.core


def platform(cluster: ClusterConfig, *, local_rank: int = 0) -> Platform:
    """Decide device, dtype and backend from the flags and from what torch sees."""
    cuda = torch.cuda.is_available()
    if cluster.device == "cuda" and not cuda:
        raise ResourceError("--device cuda was asked for and torch sees no GPU: check the driver and CUDA_VISIBLE_DEVICES.")
    if cluster.device == "cpu" and not cpu_activate.ACTIVE:
        raise ResourceError("--device cpu was asked for and a GPU is visible. Hide it from the trainer with CUDA_VISIBLE_DEVICES=''.")
    dtype = torch.bfloat16 if cuda else torch.float32
    device = torch.device("cuda", local_rank % max(torch.cuda.device_count(), 1)) if cuda else torch.device("cpu")
    return Platform(device=device, dtype=dtype, backend="nccl" if cuda else "gloo")


def set_threads(training: TrainingConfig, trainers_on_node: int) -> int:
    """Set this process's compute threads: the flag, or the machine's cores shared evenly. Returns their number."""
    cores = len(os.sched_getaffinity(0))
    if training.train_threads is not None and training.train_threads > cores:
        raise ResourceError(f"--train-threads {training.train_threads} is more than the {cores} cores this process may use.")
    threads = training.train_threads or max(1, cores // max(trainers_on_node, 1))
    torch.set_num_threads(threads)
    return threads


def init_distributed(where: Platform, *, rank: int, world_size: int, master_addr: str, master_port: int, deadline_s: float) -> None:
    """Join the trainers' process group; every collective in it has `deadline_s` as its deadline."""
    if dist.is_initialized():
        raise ConfigError("torch.distributed is initialised already: one trainer per process.")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asks for it with tensor parallelism before Blackwell
    if not where.is_cpu:
        torch.cuda.set_device(where.device)
    try:
        dist.init_process_group(
            where.backend,
            init_method=f"tcp://{master_addr}:{master_port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=deadline_s),
        )
    except dist.DistNetworkError as error:
        raise ResourceError(
            f"rank {rank} cannot meet the other trainers at {master_addr}:{master_port} ({str(error)[:300]}). "
            "Is the port taken, or the address not this cluster's?"
        ) from error
    except dist.DistStoreError as error:
        raise DeadlineError(
            peer=f"trainers at {master_addr}:{master_port}",
            phase="join the process group",
            seconds=deadline_s,
            progress=f"rank {rank} of {world_size} waited",
            cure=f"Look at the log of the ranks that did not come up. ({error})",
        ) from error


def init_parallel(layout: Layout, *, seed: int, deadline_s: float) -> None:
    """Build Megatron's parallel groups and seed every generator of this process."""
    import_megatron()
    from megatron.core import parallel_state, tensor_parallel

    world = dist.get_world_size()
    for size, what in ((layout.model, "tensor x pipeline x context"), (layout.experts, "expert-tensor x expert x pipeline")):
        if world % size:
            raise ConfigError(f"{world} trainer processes cannot be split into groups of {size} ({what} parallel size): use a multiple.")
    if layout.sequence and layout.tensor == 1:
        log.info("--sequence-parallel has no effect with one tensor-parallel rank")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=max(1, round(deadline_s / 60)),
        create_gloo_process_groups=True,
    )
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())


@contextmanager
def watch_peers(phase: str, progress: str) -> Iterator[None]:
    """Turn the failure of a collective (a peer died, or did not come within the deadline) into a TrainerError that says where."""
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in PEER_FAILURES):
            raise
        raise TrainerError(
            f"trainer rank {dist.get_rank()} lost another rank during '{phase}' (last progress: {progress}): {str(error)[:300]}. "
            "Look at the log of the rank that ended or hangs."
        ) from error


def shutdown() -> None:
    """Leave the process groups. Safe to call twice."""
    if not dist.is_initialized():
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
