"""How one bucket of weights gets to the engines: what is put where, and what the engines are told. The transaction is `sync`'s.

shm    a segment of shared memory that the engines of this host map      digests by the CPU
ipc    device memory that the engines of this GPU map (CUDA IPC)         digests by the device
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vime.backends.megatron_utils.update_weight.compare import Sent
from vime.backends.weight_transfer.device_memory import share
from vime.backends.weight_transfer.digest import as_bytes, digest_bytes, digest_parts
from vime.backends.weight_transfer.segment import Segment, TensorSpec, layout
from vime.errors import WeightSyncError

__all__ = ["Bucket", "Carried", "Carrier", "DeviceCarrier", "SegmentCarrier", "carrier_of", "dtype_name"]

Bucket = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """One bucket, ready for the engines."""

    sent: dict[str, Sent]
    num_bytes: int
    info: dict[str, Any]  # for the engines' `update_weights`


class Carrier(Protocol):
    """Holds one bucket at a time."""

    def put(self, bucket: Bucket) -> Carried:
        """Lay the bucket out where the engines will take it from. The bucket before it is gone then."""
        ...

    def delivered(self) -> None:
        """Every engine has answered."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


def carrier_of(transport: str, run_id: str) -> Carrier:
    """The carrier of `--update-weight-transport`; `run_id` is part of the names of what it makes."""
    if transport == "ipc":
        return DeviceCarrier()
    if transport == "shm":
        return SegmentCarrier(run_id)
    raise WeightSyncError(f"--update-weight-transport {transport} is unknown: shm and ipc are there.")


class SegmentCarrier:
    """Shared memory; one segment for all buckets that fit into it."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._segment: Segment | None = None

    def put(self, bucket: Bucket) -> Carried:
        data = [as_bytes(tensor) for _, tensor in bucket]
        specs, size = _layout(bucket)
        if self._segment is None or self._segment.num_bytes < size:
            self.close()
            self._segment = Segment.create(self._run_id, size)
        carried = _carried(specs, size, [digest_bytes(each) for each in data], {"segment": self._segment.name})
        carried.info["tensors"] = [spec.to_wire() for spec in self.fill(self._segment, specs, data)]
        return carried

    def fill(self, segment: Segment, specs: list[TensorSpec], data: list[torch.Tensor]) -> list[TensorSpec]:
        """Copy the tensors' bytes into the segment; returns where the engines find them."""
        shared = torch.frombuffer(segment.memory, dtype=torch.uint8)
        for spec, source in zip(specs, data, strict=True):
            shared[spec.offset : spec.offset + spec.num_bytes].copy_(source)
        return specs

    def delivered(self) -> None:
        if self._segment is not None:  # every engine has mapped it: from here on nothing of it can be left behind
            self._segment.unlink()

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class DeviceCarrier:
    """Memory of the trainer's device; one buffer for all buckets that fit into it."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def put(self, bucket: Bucket) -> Carried:
        specs, size = _layout(bucket)
        device = bucket[0][1].device
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        parts = [self._buffer[spec.offset : spec.offset + spec.num_bytes] for spec in specs]
        for part, (_, tensor) in zip(parts, bucket, strict=True):
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        digests = digest_parts(parts)  # read back, so that the device is done with the buffer
        return _carried(specs, size, digests, {"memory": share(self._buffer)})

    def delivered(self) -> None:
        return None

    def close(self) -> None:
        self._buffer = None


def _layout(bucket: Bucket) -> tuple[list[TensorSpec], int]:
    return layout([(name, dtype_name(t), tuple(t.shape), t.numel() * t.element_size()) for name, t in bucket])


def _carried(specs: list[TensorSpec], size: int, digests: list[str], where: dict[str, Any]) -> Carried:
    sent: dict[str, Sent] = {}
    for spec, digest in zip(specs, digests, strict=True):
        if spec.name in sent:
            raise WeightSyncError(f"The trainer sent the tensor '{spec.name}' twice in one update.")
        sent[spec.name] = (spec.dtype, list(spec.shape), digest)
    info = {**where, "num_bytes": size, "tensors": [spec.to_wire() for spec in specs]}
    return Carried(sent=sent, num_bytes=sum(spec.num_bytes for spec in specs), info=info)


def dtype_name(tensor: torch.Tensor) -> str:
    """Its dtype's name, as it travels: "float32"."""
    return str(tensor.dtype).removeprefix("torch.")
