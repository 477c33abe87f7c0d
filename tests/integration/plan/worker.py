"""One trainer in a process of its own: how its resident memory grows from before the model to the peak of its steps.

    python worker.py MODEL SAMPLES LENGTH LORA_RANK MEGATRON_TOKENS...     (LORA_RANK 0: all weights are trained)

prints {"grown": bytes} on the last line.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import numpy as np

from vime.backends.megatron_utils.actor import MegatronTrainer
from vime.config import sections as s
from vime.config.run import RunConfig
from vime.types import StepPlan, TrainBatch, TrainSample

STEPS = 3  # the first makes the optimizer's state; from the second on the allocator keeps what it has


def resident(name: str) -> int:
    """A size in bytes from /proc/self/status: VmRSS, or VmHWM, its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel does not tell {name}")


def batch(number: int, samples: int, length: int) -> TrainBatch:
    """`samples` of `length` tokens without a common prompt, in one micro-batch; all but the first token trained."""
    rng = np.random.default_rng(number)
    made = tuple(
        TrainSample(
            tokens=rng.integers(0, 1000, length), response_length=length - 1, loss_mask=np.ones(length - 1, np.float32),
            reward=float(rng.normal()), raw_reward=0.0, sample_id=i, group_id=0, rollout_id=i, rollout_mask_sum=float(length - 1),
            rollout_log_probs=-np.ones(length - 1, np.float32),
        )
        for i in range(samples)
    )  # fmt: skip
    plan = StepPlan(micro_batches=(tuple(range(samples)),), num_rollouts=samples, num_tokens=float(samples * (length - 1)))
    return TrainBatch(rollout_id=number, samples=made, steps=(plan,))


def main() -> None:
    model, samples, length, rank, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]
    before = resident("VmRSS")
    config = RunConfig(
        model=s.ModelConfig(hf_checkpoint=model),
        training=s.TrainingConfig(lr=1e-4, train_threads=2),
        data=s.DataConfig(num_rollout=STEPS, rollout_batch_size=samples),
        lora=s.LoraConfig(lora_rank=rank or None),
        megatron_tokens=tuple(tokens),
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    trainer = MegatronTrainer(config, rank=0, world_size=1, master_addr="127.0.0.1", master_port=port)
    for number in range(STEPS):
        trainer.train(batch(number, samples, length))
    print(json.dumps({"grown": resident("VmHWM") - before}))
    trainer.shutdown()


if __name__ == "__main__":
    main()
