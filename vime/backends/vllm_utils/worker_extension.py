"""Methods that vLLM adds to its workers (`--worker-extension-cls`): what `/collective_rpc` may call there."""

from __future__ import annotations

from typing import Any

__all__ = ["WorkerExtension"]


class WorkerExtension:
    """Mixed into vLLM's Worker, so `self` is the worker."""

    def vime_received_weights(self) -> dict[str, Any]:
        """What the weight transport of this worker received in the last update: see ShmWeightTransferEngine.received."""
        return self.weight_transfer_engine.received  # type: ignore[attr-defined]

    def vime_identity(self) -> dict[str, Any]:
        """What this worker computes with, for the handshake: fields of `handshake.EngineFacts`. The same in all workers."""
        worker: Any = self
        model, scheduler, transport = worker.model_config, worker.scheduler_config, worker.weight_transfer_engine
        name = model.served_model_name
        bound = getattr(scheduler, "max_num_queued_reqs", None)  # of all unfinished requests; older vLLM has no bound
        return {
            "model": str(model.model),
            "served_name": str(name[0] if isinstance(name, list) else name),
            "dtype": str(model.dtype).removeprefix("torch."),
            "vocab_size": int(model.get_vocab_size()),
            "max_model_len": int(model.max_model_len),
            "tensor_parallel_size": int(worker.parallel_config.tensor_parallel_size),
            "logprobs_mode": str(model.logprobs_mode),
            "generation_config": str(model.generation_config),
            "transport": str(transport.config.backend) if transport is not None else "none",
            "max_requests": None if bound is None else int(bound),
            "max_logprobs": int(model.max_logprobs),
        }
