"""Device memory shared by the trainer and the engines of one GPU (CUDA IPC). The handle travels as text: nothing is unpickled.

Who made the memory keeps it alive until all who mapped it have let go; torch counts them.
"""

from __future__ import annotations

import base64
from typing import Any

import torch

from vime.errors import WeightSyncError

__all__ = ["attach", "device_id", "share"]

_BYTES = ("handle", "ref_counter_handle", "event_handle")  # of what torch says of a shared storage


def device_id(device: torch.device | int) -> str:
    """The name of a GPU that all processes of the host have for it, whatever number each gives it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def share(memory: torch.Tensor) -> dict[str, Any]:
    """What another process needs to map `memory` [N] uint8 of a CUDA device; plain values, ready for JSON. Valid while `memory` lives."""
    _, handle, num_bytes, offset, counter, counter_offset, event, wait = memory.untyped_storage()._share_cuda_()
    values = {"handle": handle, "ref_counter_handle": counter, "event_handle": event}
    return {
        "device": device_id(memory.device),
        **{name: base64.b64encode(value).decode() for name, value in values.items()},
        "num_bytes": num_bytes,
        "offset": offset,
        "ref_counter_offset": counter_offset,
        "event_sync_required": wait,
    }


def attach(shared: dict[str, Any], device: torch.device) -> torch.Tensor:
    """The memory [N] uint8 that another process shares. It is let go when nothing looks at it any more.

    Raises:
        WeightSyncError: it lies on another GPU than `device`.
    """
    here = device_id(device)
    if shared["device"] != here:
        raise WeightSyncError(
            f"the trainer's weights lie on GPU {shared['device']}, this engine computes on {here}: CUDA IPC is for both on one GPU. "
            "Say --colocate, or --update-weight-transport shm."
        )
    raw = {name: base64.b64decode(shared[name]) for name in _BYTES}
    storage = torch.UntypedStorage._new_shared_cuda(
        torch.cuda.current_device() if device.index is None else device.index,
        raw["handle"],
        int(shared["num_bytes"]),
        int(shared["offset"]),
        raw["ref_counter_handle"],
        int(shared["ref_counter_offset"]),
        raw["event_handle"],
        bool(shared["event_sync_required"]),
    )
    return torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)
