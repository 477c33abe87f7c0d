"""The digest sees bytes, in row-major order."""

from __future__ import annotations

import pytest
import torch

from vime.backends.weight_transfer.digest import as_bytes, digest_parts, digest_tensor


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


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).view(torch.uint8)


@pytest.mark.parametrize("size", [1, 8, 1000, 8 * 2**20 + 24, 8 * 2**20 * 17])
def test_on_a_device_one_bit_changes_it_wherever_it_is(size: int) -> None:
    part = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    (whole,) = digest_parts([part])
    assert digest_parts([part.clone()]) == [whole]
    for place in (0, size // 2, size - 1):
        other = part.clone()
        other[place] ^= 0x80
        assert digest_parts([other]) != [whole]


def test_on_a_device_order_and_signs_count() -> None:
    """The top bit of two words is what a plain sum of products with odd keys would not see."""
    top = -(2**63)
    different = [words(1, 2, 3), words(2, 1, 3), words(1 ^ top, 2 ^ top, 3), words(~1, ~2, ~3), words(~1, 2, 3), words(1, 2, 3, 4)]
    assert len(set(digest_parts(different))) == len(different)


def test_on_a_device_each_part_has_its_own() -> None:
    parts = [words(5, 6), words(7)]
    assert digest_parts(parts) == [*digest_parts(parts[:1]), *digest_parts(parts[1:])]
    assert digest_parts([]) == []
