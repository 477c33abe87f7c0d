"""What a bucket looks like to the engines, and what the trainer remembers of it."""

from __future__ import annotations

import pytest
import torch

from vime.backends.megatron_utils.update_weight import carriers
from vime.backends.megatron_utils.update_weight.carriers import DeviceCarrier, SegmentCarrier, carrier_of
from vime.backends.weight_transfer.digest import as_bytes, digest_parts
from vime.backends.weight_transfer.segment import Segment
from vime.errors import WeightSyncError

BUCKET = [("a.weight", torch.arange(6.0).view(2, 3).t()), ("b.bias", torch.ones(5, dtype=torch.bfloat16))]


def taken(memory: torch.Tensor, info: dict) -> dict[str, torch.Tensor]:
    """The tensors as an engine takes them out."""
    out = {}
    for spec in info["tensors"]:
        raw = memory[spec["offset"] : spec["offset"] + spec["num_bytes"]]
        out[spec["name"]] = raw.view(getattr(torch, spec["dtype"])).view(spec["shape"])
    return out


def test_device_memory_holds_each_tensor_and_its_digest_is_of_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[torch.Tensor] = []
    monkeypatch.setattr(carriers, "share", lambda memory: shared.append(memory) or {"handle": "text"})
    carrier = DeviceCarrier()
    for scale in (1, 3):  # the second bucket goes into the same memory
        bucket = [(name, tensor * scale) for name, tensor in BUCKET]
        carried = carrier.put(bucket)
        assert carried.info["memory"] == {"handle": "text"}
        assert carried.num_bytes == sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
        found = taken(shared[-1], carried.info)
        for name, tensor in bucket:
            assert torch.equal(found[name], tensor)
            assert carried.sent[name] == (str(tensor.dtype)[6:], list(tensor.shape), digest_parts([as_bytes(tensor)])[0])
    assert shared[0] is shared[1]
    carrier.close()


def test_a_segment_serves_all_buckets_that_fit_and_has_no_name_once_delivered() -> None:
    carrier = SegmentCarrier("carriers")
    first = carrier.put(BUCKET).info["segment"]
    carrier.delivered()
    carried = carrier.put(BUCKET[1:])
    assert carried.info["segment"] == first
    with pytest.raises(FileNotFoundError):
        Segment.attach(first)
    large = carrier.put([("c", torch.zeros(2**20))]).info["segment"]
    assert large != first
    attached = Segment.attach(large)
    assert attached.num_bytes >= 2**22
    attached.close()
    carrier.close()


def test_a_name_that_stands_twice_in_a_bucket_is_refused() -> None:
    carrier = SegmentCarrier("carriers")
    with pytest.raises(WeightSyncError, match=r"'b\.bias' twice"):
        carrier.put([BUCKET[1], BUCKET[1]])
    carrier.close()


def test_an_unknown_transport_is_named() -> None:
    with pytest.raises(WeightSyncError, match="pigeon"):
        carrier_of("pigeon", "run")
