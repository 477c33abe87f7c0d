"""A run's adapters: built from the flags, kept in checkpoints without the base model, exported for PEFT and the engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from vime.backends.megatron_utils.convert.ops import Op
from vime.backends.megatron_utils.convert.transfer import HFWeights, Ranks
from vime.backends.megatron_utils.convert.writer import written_by_first
from vime.backends.megatron_utils.lora import attach_adapters
from vime.backends.megatron_utils.lora_peft import ADAPTER_FOLDER, PeftFolder, adapter_settings, base_digest, write_peft
from vime.config.run import RunConfig

__all__ = ["RunAdapters"]

BUCKET_BYTES = 64 * 1024**2


class RunAdapters:
    """The adapters of a model that was just built and filled with the weights of --hf-checkpoint, which stay frozen. Collective."""

    def __init__(
        self, config: RunConfig, chunks: Sequence[torch.nn.Module], ops: Sequence[Op], ranks: Ranks, base_weights: HFWeights
    ) -> None:
        lora, folder = config.lora, str(config.model.hf_checkpoint)
        self._base = folder
        settings = adapter_settings(lora, ops)
        self._adapters = attach_adapters(chunks, ops, settings, ranks, seed=config.training.seed)
        if lora.lora_load is not None:
            source = PeftFolder(lora.lora_load)
            source.check(self._adapters.found)
            self._adapters.fill(source.tensor, ranks)
        self.weights = self._adapters.weights(ranks)
        base_weights.change = self._adapters.merged
        self.saved: dict[str, Any] = settings.as_saved(base_digest(folder))  # what a checkpoint says of them

    def off(self) -> AbstractContextManager[None]:
        """Inside, the model is the base model."""
        return self._adapters.off()

    def buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The factors under PEFT's names without its prefix, as `HFWeights.buckets` gives them; without the 0 of layers that have no
        adapter. Collective.
        """
        wanted = self._adapters.names
        for bucket in self.weights.buckets(bucket_bytes):
            yield [(name, tensor) for name, tensor in bucket if name in wanted]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All factors on rank 0; empty elsewhere. Collective."""
        return {name: tensor for bucket in self.buckets(BUCKET_BYTES) for name, tensor in bucket}

    def write(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
        """Write `tensors`, all factors, as `folder`/adapter, which PEFT loads; its path."""
        mine, base = self._adapters, str(Path(self._base).absolute())
        write_peft(folder / ADAPTER_FOLDER, mine.settings, mine.found, tensors, base=base, digest=self.saved["base"])
        return folder / ADAPTER_FOLDER

    def save(self, folder: Path) -> None:
        """Write `folder`/adapter, which PEFT loads. Collective; raises ResourceError on all ranks when it cannot be written."""
        tensors = self.tensors()
        written_by_first(lambda: self.write(folder, tensors))
