"""Digest of a tensor's bytes, the same on the trainer's and the engine's side."""

from __future__ import annotations

import torch
import xxhash

__all__ = ["as_bytes", "digest_bytes", "digest_tensor"]


def digest_bytes(raw: torch.Tensor) -> str:
    """xxh3_128 over a contiguous uint8 CPU tensor [N], as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(memoryview(raw.numpy()))


def digest_tensor(tensor: torch.Tensor) -> str:
    """The digest of a tensor's bytes in row-major order; any dtype, shape and device."""
    return digest_bytes(as_bytes(tensor))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in row-major order as a uint8 CPU tensor [N]; a view when it is contiguous and on the CPU."""
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
