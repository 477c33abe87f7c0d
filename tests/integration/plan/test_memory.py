"""What the plan says a trainer on a CPU needs, against what its process really grows by."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vime.config import RunConfig
from vime.config import sections as s
from vime.plan.footprint import total
from vime.plan.settings import PlanOptions, settings_of
from vime.plan.trainer import held, train_items

pytestmark = pytest.mark.integration

WORKER = Path(__file__).with_name("worker.py")
FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
# Not counted: threads, kernels that oneDNN compiles, holes between blocks of the allocator. Seen: the plan is off by -4 % to +2 %.
TOLERANCE = 0.15


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """63 million float32 weights: 240 MiB."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=8192, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12, num_key_value_heads=4,
        head_dim=64, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("samples", "length", "rank", "tokens"),
    [(8, 128, 0, []), (8, 256, 0, FULL), (8, 128, 16, [])],
    ids=["activations kept", "recomputed", "adapters"],
)
def test_a_trainer_grows_by_what_the_plan_says(model: Path, samples: int, length: int, rank: int, tokens: list[str]) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}
    if rank:  # nearly all of it is activations, between whose blocks glibc leaves holes of another 30 % unless it maps each by itself
        env["MALLOC_MMAP_THRESHOLD_"] = "500000"
    command = [sys.executable, "-W", "ignore", str(WORKER), str(model), str(samples), str(length), str(rank), *tokens]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads(done.stdout.strip().splitlines()[-1])["grown"]

    megatron = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} if tokens else {}
    config = RunConfig(
        model=s.ModelConfig(hf_checkpoint=str(model)),
        data=s.DataConfig(rollout_batch_size=samples, micro_batch_size=samples, num_rollout=1),
        rollout=s.RolloutConfig(rollout_max_context_len=length, rollout_max_response_len=length - 1),
        debug=s.DebugConfig(debug_train_only=True),
        lora=s.LoraConfig(lora_rank=rank or None),
        megatron=megatron,
    )
    settings = settings_of(config, PlanOptions())
    always = total(held(settings, 0))
    predicted = always + total(train_items(settings, 0))
    assert measured > always, "weights, gradients and optimizer alone"
    assert measured == pytest.approx(predicted, rel=TOLERANCE), f"measured {measured / 2**20:.0f}, predicted {predicted / 2**20:.0f} MiB"
