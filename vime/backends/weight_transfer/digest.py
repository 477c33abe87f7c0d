"""Digests of tensors' bytes, the same on the trainer's and the engine's side.

What lies in host memory is digested by xxh3_128. What lies on a device is digested there (`digest_parts`): bringing it to the host would
take longer than sending it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import xxhash

__all__ = ["as_bytes", "digest_bytes", "digest_parts", "digest_tensor"]

_ROW = 2**20  # words whose keys are held in memory; longer tensors are rows of as many
_ROWS = 2**14  # 128 GiB of one tensor
_BLOCK = 16  # rows at a time: 128 MiB of products


def digest_bytes(raw: torch.Tensor) -> str:
    """xxh3_128 over a contiguous uint8 CPU tensor [N], as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(memoryview(raw.numpy()))


def digest_tensor(tensor: torch.Tensor) -> str:
    """The digest of a tensor's bytes in row-major order; any dtype, shape and device."""
    return digest_bytes(as_bytes(tensor))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in row-major order as a uint8 CPU tensor [N]; a view when it is contiguous and on the CPU."""
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)


def digest_parts(parts: Sequence[torch.Tensor]) -> list[str]:
    """A digest of each of `parts` ([N] uint8 each, all on one device, starting at multiples of 8 bytes), as 32 hexadecimal digits.

    Two multilinear hashes modulo 2^64 (Carter and Wegman 1979, with odd keys) of the 8-byte words, whose upper half is first folded into
    the lower: two different parts of one length agree with a probability of about 2^-64 each. Against errors, not against forgery.
    """
    if not parts:
        return []
    sums = torch.stack([_digest(part) for part in parts]).cpu().numpy().view(np.uint64)
    return [f"{int(first):016x}{int(second):016x}" for first, second in sums]


def _digest(part: torch.Tensor) -> torch.Tensor:
    """[2] i64."""
    keys, rows = _keys(part.device)
    if len(part) % 8:
        part = torch.nn.functional.pad(part, (0, -len(part) % 8))
    words = part.view(torch.int64)
    full = len(words) // _ROW
    sums = [_hash(block, keys) for block in words[: full * _ROW].view(full, _ROW).split(_BLOCK)]
    if len(words) % _ROW:
        sums.append(_hash(words[None, full * _ROW :], keys[:, : len(words) % _ROW]))
    if not sums:
        return torch.zeros(2, dtype=torch.int64, device=part.device)
    each = torch.cat(sums, dim=1)
    return (each * rows[:, : each.shape[1]]).sum(1)


def _hash(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """words [R, W], keys [2, W] -> [2, R]."""
    folded = words ^ ((words >> 32) & 0xFFFFFFFF)
    return torch.stack([(folded * key).sum(1) for key in keys])


@functools.lru_cache(maxsize=8)
def _keys(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of words [2, _ROW] and of rows [2, _ROWS]: odd numbers of splitmix64 (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        z = np.arange(1, 2 * (_ROW + _ROWS) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd = torch.from_numpy(((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64).copy()).to(device)
    return odd[: 2 * _ROW].view(2, _ROW), odd[2 * _ROW :].view(2, _ROWS)
