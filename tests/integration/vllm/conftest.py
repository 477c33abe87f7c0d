"""A trainer's side for weight syncs: transformers' own forward pass over weights that tests choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from vime.backends.megatron_utils.update_weight.sync import WeightUpdater
from vime.backends.vllm_utils.server import EngineServer
from vime.config.sections import WeightUpdateConfig
from vime.types import WeightSyncReport

PROBE = [5, 6, 7, 8, 20, 30, 40, 50, 60, 70]


class Trainer:
    """A model whose weights can be drawn anew and sent."""

    def __init__(self, model: Qwen3ForCausalLM, engine: EngineServer, next_version: Callable[[], int]) -> None:
        self.model, self.engine, self._next_version = model, engine, next_version
        self.version = 0

    def draw(self, seed: int) -> None:
        """New random weights."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + float(parameter.ndim == 1))

    def log_probs(self, tokens: list[int]) -> list[float]:
        """log p(tokens[i + 1] | tokens[: i + 1])."""
        with torch.no_grad():
            rows = torch.log_softmax(self.model(torch.tensor([tokens])).logits[0].float(), -1)
        return [float(rows[i, token]) for i, token in enumerate(tokens[1:])]

    def buckets(self, size: int = 7) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """All weights but the tied output layer, `size` tensors at a time."""
        named = [(name, tensor) for name, tensor in self.model.state_dict().items() if name != "lm_head.weight"]
        for start in range(0, len(named), size):
            yield named[start : start + size]

    def nudge(self, least: float) -> float:
        """Scale the embedding, and the output layer tied to it, until the probe moves by `least`; returns by how much it did."""
        before, scale = self.log_probs(PROBE), 1e-6
        while True:
            with torch.no_grad():
                self.model.model.embed_tokens.weight.mul_(1 + scale)
            moved = max(abs(a - b) for a, b in zip(before, self.log_probs(PROBE), strict=True))
            if moved >= least:
                return moved

    def updater(self, config: WeightUpdateConfig | None = None, kind: type[WeightUpdater] = WeightUpdater) -> WeightUpdater:
        """A sender to the engine."""
        return kind(config or WeightUpdateConfig(), run_id="tests")

    def send(
        self,
        updater_class: type[WeightUpdater] = WeightUpdater,
        config: WeightUpdateConfig | None = None,
        bucket_size: int = 7,
        updater: WeightUpdater | None = None,
    ) -> WeightSyncReport:
        """Sync the present weights as the next version."""
        self.version = self._next_version()
        updater = updater or self.updater(config, updater_class)
        return updater.update([self.engine.endpoint], self.version, iter(self.buckets(bucket_size)), PROBE, self.log_probs)


@pytest.fixture(scope="session")
def hf_model(tiny_model: Path) -> Qwen3ForCausalLM:
    """transformers' reading of the small model."""
    return Qwen3ForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


@pytest.fixture
def trainer(
    hf_model: Qwen3ForCausalLM, engine: EngineServer, next_version: Callable[[], int], stale_output_layer: Path
) -> Iterator[Trainer]:
    """A trainer; afterwards the engine is left with complete weights and running, whatever the test did to it."""
    made = Trainer(hf_model, engine, next_version)
    yield made
    stale_output_layer.unlink(missing_ok=True)
    made.draw(0)
    made.send()
