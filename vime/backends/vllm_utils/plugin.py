"""What vLLM loads from us in each of its processes, through its entry point group `vllm.general_plugins`."""

from __future__ import annotations

__all__ = ["SHM_TRANSPORT", "register"]

SHM_TRANSPORT = "shm"


def register() -> None:
    """Make our weight transports known to vLLM by name. May be called several times in one process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # heavy: only when vLLM itself calls

    if SHM_TRANSPORT not in WeightTransferEngineFactory._registry:
        module = "vime.backends.vllm_utils.shm_transport"
        WeightTransferEngineFactory.register_engine(SHM_TRANSPORT, module, "ShmWeightTransferEngine")
