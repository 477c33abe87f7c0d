"""One trainer on a CUDA device, and the same model in transformers. `scripts/gpu_tests.sh` runs this folder; nothing else does."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.quickstart.make_assets import _make_tokenizer
from vime.config import sections as s
from vime.config.run import RunConfig
from vime.types import StepPlan, TrainBatch, TrainSample

SHAPE = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder needs a device."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 with weights that bfloat16 holds exactly, so that both sides begin with the same."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(torch.bfloat16)
    model.save_pretrained(folder)
    _make_tokenizer().save_pretrained(folder)  # engines do not start without one
    return folder


def run_config(folder: Path, **sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "cluster": s.ClusterConfig(device="cuda"),
        "model": s.ModelConfig(hf_checkpoint=str(folder)),
        "data": s.DataConfig(num_rollout=1, rollout_batch_size=1),
        "training": s.TrainingConfig(lr=1e-3),
        "megatron_tokens": ("--lr-decay-style", "constant", "--weight-decay", "0.0"),
    }
    return RunConfig(**(values | sections))


@pytest.fixture(scope="session")
def trainer(model_folder: Path) -> Iterator[Any]:
    from vime.backends.megatron_utils.actor import MegatronTrainer

    config = run_config(model_folder, algorithm=s.AlgorithmConfig(loss_type="sft_loss", advantage_estimator="grpo"))
    made = MegatronTrainer(config, rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port())
    yield made
    made.shutdown()


def samples(lengths: list[tuple[int, int]], *, seed: int = 0, vocab: int = SHAPE["vocab_size"]) -> list[TrainSample]:  # type: ignore[assignment]
    """Random sequences; (prompt, response) tokens of each."""
    rng = np.random.default_rng(seed)
    return [
        TrainSample(
            tokens=rng.integers(0, vocab, prompt + response), response_length=response, loss_mask=np.ones(response, np.float32),
            reward=float(rng.normal()), raw_reward=0.0, sample_id=i, group_id=0, rollout_id=i, rollout_mask_sum=float(response),
        )
        for i, (prompt, response) in enumerate(lengths)
    ]  # fmt: skip


def train_batch(given: list[TrainSample], micro_batches: tuple[tuple[int, ...], ...]) -> TrainBatch:
    plan = StepPlan(
        micro_batches=micro_batches,
        num_rollouts=len(given),
        num_tokens=float(sum(x.response_length for x in given)),
        num_sequences=len(given),
    )
    return TrainBatch(rollout_id=0, samples=tuple(given), steps=(plan,))
