"""What vLLM loads from us in each of its processes, through its entry point group `vllm.general_plugins`."""

from __future__ import annotations

import ctypes
import os
import signal

from vime.backends.vllm_utils.control_guard import SECRET_ENV

__all__ = ["BACKENDS", "register"]

BACKENDS = {"shm": "shm", "ipc": "vime_ipc"}  # --update-weight-transport -> its name in vLLM, which has an "ipc" of its own
_ENGINES = {"shm": "ShmWeightTransferEngine", "ipc": "IpcWeightTransferEngine"}
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Make our weight transports known to vLLM by name. May be called several times in one process.

    In an engine that vime started, each process is also told to die with its parent: vLLM's EngineCore does not notice by
    itself that the API server was killed.
    """
    if SECRET_ENV in os.environ:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # heavy: only when vLLM itself calls

    for transport, name in BACKENDS.items():
        if name not in WeightTransferEngineFactory._registry:
            module = f"vime.backends.vllm_utils.{transport}_transport"
            WeightTransferEngineFactory.register_engine(name, module, _ENGINES[transport])
