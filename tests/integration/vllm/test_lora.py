"""Adapters merged into the weights that are sent: a real engine computes what the trainer computes with them beside its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import engine_config
from tests.integration.vllm.test_experts import PROBE, free_port
from vime.backends.megatron_utils.actor import MegatronTrainer
from vime.backends.megatron_utils.update_weight.sync import WeightUpdater
from vime.backends.vllm_utils.server import EngineServer
from vime.config.sections import ClusterConfig, DataConfig, LoraConfig, TrainingConfig, WeightUpdateConfig

pytestmark = pytest.mark.integration


def test_merged_adapters_are_what_the_engine_computes_with(engine: EngineServer, tiny_model: Path, next_version: Callable[[], int]) -> None:
    config = dataclasses.replace(
        engine_config(tiny_model),
        training=TrainingConfig(train_threads=1),
        data=DataConfig(num_rollout=1),
        cluster=ClusterConfig(actor_num_gpus_per_node=1, actor_deadline=120.0),
        lora=LoraConfig(lora_rank=4),
    )
    trainer = MegatronTrainer(config, rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port())
    try:
        updater = WeightUpdater(WeightUpdateConfig(), run_id="lora")
        start = trainer.log_probs(PROBE)
        for seed in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for chunk in trainer._model:
                    for parameter in chunk.parameters():
                        if parameter.requires_grad:
                            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            report = updater.update([engine.endpoint], next_version(), trainer.hf_weights(100_000), PROBE, trainer.log_probs)
            assert report.proof_max_abs_diff < 1e-4
        moved = max(abs(a - b) for a, b in zip(trainer.log_probs(PROBE), start, strict=True))
        assert moved > 0.05
        assert trainer.adapters is not None
        with trainer.adapters.off():
            assert trainer.log_probs(PROBE) == start, "the base is as it was, to the bit"
    finally:
        trainer.shutdown()
