"""`AdapterUpdater`: only the adapters go to the engines, which hold the frozen model already and compute with both (--lora-sync adapter).

    write a PEFT folder ─▶ pause (keep) ─▶ reset prefix cache ─▶ load it ─▶ version ─▶ resume ─▶ proof

The adapter has one name, `POLICY_ADAPTER`, which every request for the policy gives; an engine refuses others until it is loaded. Digests
cannot tell what an engine holds of it (vLLM stacks and scales the factors): the log-probs of the proof do. An engine may read the
folder again as long as it has that version, so it stands until the next one is loaded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from vime.backends.megatron_utils.update_weight.carriers import Bucket, dtype_name
from vime.backends.megatron_utils.update_weight.sync import WeightUpdater
from vime.backends.weight_transfer.digest import as_bytes, digest_bytes
from vime.config.sections import POLICY_ADAPTER, WeightUpdateConfig

__all__ = ["AdapterUpdater"]


class AdapterUpdater(WeightUpdater):
    """Sends adapters to engines on this host. What it is given as buckets are the factors under Hugging Face names."""

    model = POLICY_ADAPTER

    def __init__(
        self,
        config: WeightUpdateConfig,
        *,
        run_id: str,
        write: Callable[[Path, Mapping[str, torch.Tensor]], Path],
        step_seconds: float | None = None,
    ) -> None:
        """`write(folder, factors)` makes a PEFT folder in `folder` and returns its path."""
        super().__init__(config, run_id=run_id, step_seconds=step_seconds)
        self._write = write
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the version that the engines have

    def _transaction(
        self, pool: ThreadPoolExecutor, version: int, buckets: Iterator[Bucket], probe: list[int], expected: list[float]
    ) -> float:
        folder = tempfile.TemporaryDirectory(prefix=f"vime_adapter_{self._run_id}_")
        with self._phase("write"):
            factors = {name: tensor for bucket in buckets for name, tensor in bucket}
            for name, tensor in factors.items():
                data = as_bytes(tensor)
                self._sent[name] = (dtype_name(tensor), list(tensor.shape), digest_bytes(data))
                self._bytes += data.numel()
            path = str(self._write(Path(folder.name), factors))
        with self._phase("pause"):
            self._all(pool, lambda engine: engine.pause("keep", self._left()))
            self._all(pool, lambda engine: engine.reset_prefix_cache(self._left()))
        with self._phase("transfer"):
            self._all(pool, lambda engine: engine.load_adapter(POLICY_ADAPTER, path, self._left()))
        before, self._folder = self._folder, folder
        if before is not None:
            before.cleanup()
        with self._phase("finish"):
            self._all(pool, lambda engine: engine.set_weight_version(str(version), self._left()))
        with self._phase("resume"):
            self._all(pool, lambda engine: engine.resume(self._left()))
        with self._phase("proof"):
            return self._prove(pool, version, probe, expected)
