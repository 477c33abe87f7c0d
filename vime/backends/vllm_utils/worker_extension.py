"""Methods that vLLM adds to its workers (`--worker-extension-cls`): what `/collective_rpc` may call there."""

from __future__ import annotations

from typing import Any

__all__ = ["WorkerExtension"]


class WorkerExtension:
    """Mixed into vLLM's Worker, so `self` is the worker."""

    def vime_received_weights(self) -> dict[str, Any]:
        """What the weight transport of this worker received in the last update: see ShmWeightTransferEngine.received."""
        return self.weight_transfer_engine.received  # type: ignore[attr-defined]
