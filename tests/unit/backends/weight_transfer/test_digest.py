"""The digest sees bytes, in row-major order."""

from __future__ import annotations

import pytest
import torch

from vime.backends.weight_transfer.digest import as_bytes, digest_tensor


def test_one_bit_changes_it() -> None:
    tensor = torch.randn(33, 7, generator=torch.Generator().manual_seed(0))
    other = tensor.clone()
    as_bytes(other)[5] ^= 1
    assert digest_tensor(tensor) != digest_tensor(other)
    assert digest_tensor(tensor) == digest_tensor(tensor.clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_a_transposed_view_digests_like_its_copy(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    assert digest_tensor(tensor.t()) == digest_tensor(tensor.t().contiguous())
    assert digest_tensor(tensor.t()) != digest_tensor(tensor)


def test_known_value() -> None:
    assert digest_tensor(torch.zeros(0)) == "99aa06d3014798d86001c324468d497f"  # xxh3_128 of nothing, as xxHash publishes it
