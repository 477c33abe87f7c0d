"""Experts in a real engine: a sync packs them anew, the second as well as the first."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import START_SECONDS, engine_config
from tests.tiny_models import MODELS, write_model
from vime.backends.megatron_utils.actor import MegatronTrainer
from vime.backends.megatron_utils.update_weight.sync import WeightUpdater
from vime.backends.vllm_utils.server import EngineServer
from vime.config.sections import ClusterConfig, DataConfig, TrainingConfig, WeightUpdateConfig

pytestmark = pytest.mark.integration

SIZES = {"vocab_size": 128, "hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 32, "max_position_embeddings": 512}
PROBE = [5, 6, 7, 8, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 3]


def free_port() -> int:
    rng = random.SystemRandom()
    while True:
        port = rng.randrange(15_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def test_an_engine_computes_with_the_experts_that_were_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, changes = MODELS["qwen3_moe"]
    monkeypatch.setitem(MODELS, "engine", (family, changes | SIZES))
    model = write_model("engine", tmp_path / "model")
    sections = {
        "training": TrainingConfig(train_threads=1),
        "data": DataConfig(num_rollout=1),
        "cluster": ClusterConfig(actor_num_gpus_per_node=1, actor_deadline=120.0),
        "vllm_tokens": ("--skip-tokenizer-init",),
    }
    config = engine_config(model, **sections)
    engine = EngineServer(config, index=0, log_path=tmp_path / "engine.log", run_id="experts")
    trainer = None
    try:
        trainer = MegatronTrainer(config, rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port())
        engine.wait_healthy(START_SECONDS)
        updater = WeightUpdater(WeightUpdateConfig(), run_id="experts")
        for version in (1, 2):
            generator = torch.Generator().manual_seed(version)
            with torch.no_grad():
                for chunk in trainer._model:
                    for parameter in chunk.parameters():
                        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
            report = updater.update([engine.endpoint], version, trainer.hf_weights(100_000), PROBE, trainer.log_probs)
            assert report.proof_max_abs_diff < 1e-4
    finally:
        engine.stop()
        if trainer is not None:
            trainer.shutdown()
