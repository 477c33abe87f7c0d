"""Worker side of the `shm` weight transport: flat buckets out of shared memory into vLLM's own weight loading.

Runs inside vLLM's worker processes. A bucket is copied once into private memory (vLLM keeps views of it until a whole layer
has arrived, so the sender may reuse the segment at once), digested tensor by tensor, and loaded. Two things that vLLM's base
class does are wrong for CPU workers and are done otherwise here: see `update_weights` and `_redispatch_packed_layers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from vime.backends.weight_transfer.digest import digest_bytes
from vime.backends.weight_transfer.segment import Segment

DERIVED = (".W_UK_T", ".W_UV")  # latent attention: made by vLLM of kv_b_proj, which is loaded

__all__ = ["ShmInitInfo", "ShmUpdateInfo", "ShmWeightTransferEngine"]


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: segments are named bucket by bucket."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One bucket: the segment's name, the bytes in use, and where each tensor lies (`TensorSpec.to_wire`)."""

    segment: str
    num_bytes: int
    tensors: list[dict[str, Any]]


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Receives weights in checkpoint format (Hugging Face names, full tensors) from shared memory."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._segment: Segment | None = None
        self._received: dict[str, list[Any]] = {}
        self._unloaded: set[str] = set()

    @property
    def received(self) -> dict[str, Any]:
        """What this worker got in the present (or last) update: [dtype, shape, digest] per tensor, and what it lacks."""
        return {"tensors": self._received, "unloaded": sorted(self._unloaded)}

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Nothing to set up: each bucket names its segment."""

    def start_weight_update(self) -> None:
        """Take the model's layers apart for reloading."""
        self._received = {}
        self._unloaded = {name for name, _ in self.model.named_parameters() if not name.endswith(DERIVED)}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. The base class synchronises an accelerator here, which fails on a machine without one."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Copy the bucket out of shared memory, digest each tensor as received, and hand them to vLLM's loaders."""
        shared = torch.frombuffer(self._attached(update_info.segment).memory, dtype=torch.uint8, count=update_info.num_bytes)
        bucket = shared.clone()
        del shared
        self._load(bucket, update_info.tensors, lambda parts: [digest_bytes(part) for part in parts])

    def _load(self, bucket: torch.Tensor, specs: list[dict[str, Any]], digests: Callable[[list[torch.Tensor]], list[str]]) -> None:
        parts = [bucket[spec["offset"] : spec["offset"] + spec["num_bytes"]] for spec in specs]
        for spec, digest in zip(specs, digests(parts), strict=True):
            self._received[spec["name"]] = [spec["dtype"], spec["shape"], digest]
        named = zip(specs, parts, strict=True)
        weights = [(spec["name"], part.view(getattr(torch, spec["dtype"])).view(spec["shape"])) for spec, part in named]
        loaded = self.model.load_weights(weights)
        self._unloaded = set() if loaded is None else self._unloaded - loaded  # None: this model's loader does not say

    def finish_weight_update(self) -> None:
        """Put the layers together again."""
        finalize_layerwise_reload(self.model, self.model_config)
        self._redispatch_packed_layers()
        self._detach()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM up to 0.26 wants one; the trainer sends by itself (`update_weight.carriers`)."""
        raise NotImplementedError("vime's trainer sends weights by its own WeightUpdater.")

    def shutdown(self) -> None:
        """Unmap what is still mapped."""
        self._detach()

    def _redispatch_packed_layers(self) -> None:
        """Pack the output layer and the experts anew from their present weights (CPU).

        A tied output layer shares its parameter with the embedding, so the reload never processes it; but on CPU it computes
        with a packed copy made when the model was first loaded, and would go on computing with the old weights. Experts are
        packed in place at the first loading only: a reload leaves plain weights where their kernel expects packed ones.
        """
        if self.device.type != "cpu":
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for layer in self.model.modules():
            if hasattr(layer, "cpu_linear") and getattr(layer, "weight", None) is not None and layer.weight.numel() > 0:
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(layer)

    def _attached(self, name: str) -> Segment:
        if self._segment is None or self._segment.name != name:
            self._detach()
            self._segment = Segment.attach(name)
        return self._segment

    def _detach(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
