"""Worker side of the `ipc` weight transport: flat buckets out of the trainer's device memory, on the same GPU.

As `shm_transport`, but for where a bucket lies and who digests it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo

from vime.backends.vllm_utils.shm_transport import ShmWeightTransferEngine
from vime.backends.weight_transfer.device_memory import attach
from vime.backends.weight_transfer.digest import digest_parts

__all__ = ["IpcUpdateInfo", "IpcWeightTransferEngine"]


@dataclass
class IpcUpdateInfo(WeightTransferUpdateInfo):
    """One bucket: the trainer's memory (`device_memory.share`), the bytes in use, and where each tensor lies (`TensorSpec.to_wire`)."""

    memory: dict[str, Any]
    num_bytes: int
    tensors: list[dict[str, Any]]


class IpcWeightTransferEngine(ShmWeightTransferEngine):
    """Receives weights in checkpoint format (Hugging Face names, full tensors) by CUDA IPC."""

    update_info_cls = IpcUpdateInfo  # type: ignore[assignment]

    def receive_weights(self, update_info: IpcUpdateInfo) -> None:  # type: ignore[override]
        """Copy the bucket within the device, digest each tensor as received, and hand them to vLLM's loaders."""
        shared = attach(update_info.memory, self.device)
        bucket = shared[: update_info.num_bytes].clone()
        torch.accelerator.synchronize()
        del shared  # the trainer may reuse it
        self._load(bucket, update_info.tensors, digest_parts)
