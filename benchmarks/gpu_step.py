"""The trainer's step and log-prob pass on one CUDA device: time, memory, and the share of the device's matrix peak.

    python -m benchmarks.gpu_step [--shape 0.6b|4b] [--budget TOKENS] [--micro-batches N] [--rounds N] [--profile FILE] [--out FILE]

Qwen3 shapes with random weights, GRPO on log-normal lengths packed to the budget, a quarter of each sequence prompt. The step is
`MegatronTrainer.train` as a run calls it: packing, copies, forward, backward, gradient norm, optimizer. Counted as work are matrix products
only: of the linear layers for all tokens, of the output layer for the tokens that are scored, of causal attention for the pairs that see
one another; backward twice the forward pass; nothing for recomputation. The peak is a bfloat16 product of 8192^3, measured in the same
process.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vime.backends.megatron_utils.actor import MegatronTrainer
from vime.config import sections as s
from vime.config.run import RunConfig
from vime.types import StepPlan, TrainBatch, TrainSample

SHAPES: dict[str, dict[str, int]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8},
}
COMMON = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu", "attention_bias": False,
    "attention_dropout": 0.0, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


class RandomTrainer(MegatronTrainer):
    """The trainer with the weights that Megatron draws: reading a file is not what is measured."""

    def _fill(self, chunks: Sequence[torch.nn.Module], folder: str) -> None:
        return None


def lengths_of(total: int, median: int, longest: int, seed: int) -> list[int]:
    """Log-normal sequence lengths (sigma 0.6) that add up to `total`."""
    rng, out = np.random.default_rng(seed), []
    while sum(out) < total:
        out.append(int(np.clip(rng.lognormal(np.log(median), 0.6), 64, longest)))
    out[-1] -= sum(out) - total
    return [length for length in out if length > 8] if out[-1] <= 8 else out


def batch_of(budget: int, micro_batches: int) -> TrainBatch:
    """A step of as many full packs."""
    rng = np.random.default_rng(0)
    samples: list[TrainSample] = []
    packs = []
    for micro in range(micro_batches):
        begin = len(samples)
        for length in lengths_of(budget, 1200, budget // 2, micro):
            response = length - length // 4
            samples.append(
                TrainSample(
                    tokens=rng.integers(0, COMMON["vocab_size"], length), response_length=response, loss_mask=np.ones(response, np.float32),
                    reward=float(rng.normal()), raw_reward=0.0, sample_id=len(samples), group_id=0, rollout_id=len(samples),
                    rollout_mask_sum=float(response),
                )
            )  # fmt: skip
        packs.append(tuple(range(begin, len(samples))))
    trained = float(sum(x.response_length for x in samples))
    plan = StepPlan(micro_batches=tuple(packs), num_rollouts=len(samples), num_tokens=trained, num_sequences=len(samples))
    return TrainBatch(rollout_id=0, samples=tuple(samples), steps=(plan,))


def forward_flops(shape: dict[str, int], batch: TrainBatch) -> float:
    """Floating-point operations of one forward pass; see the module."""
    h, f, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    q, kv = shape["num_attention_heads"] * COMMON["head_dim"], shape["num_key_value_heads"] * COMMON["head_dim"]
    tokens = sum(x.length for x in batch.samples)
    scored = sum(x.response_length for x in batch.samples)
    pairs = sum(x.length * (x.length + 1) / 2 for x in batch.samples)
    linear = layers * (h * (q + 2 * kv) + q * h + 3 * h * f)
    return 2.0 * tokens * linear + 2.0 * scored * h * COMMON["vocab_size"] + 4.0 * layers * q * pairs


def seconds_of(work: Callable[[], Any], rounds: int) -> list[float]:
    """Seconds of each round, the device's queue empty at both ends."""
    out = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        out.append(time.perf_counter() - begun)
    return out


def matrix_peak() -> float:
    """Measured FLOP/s of bfloat16 products of 8192^3."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b

    def products() -> None:
        for _ in range(30):
            a @ b

    return 30 * 2 * 8192**3 / statistics.median(seconds_of(products, 3))


def profile(work: Callable[[], Any], path: Path) -> None:
    """Write where the device's time goes, kernel by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        work()
        torch.cuda.synchronize()
    table = found.key_averages().table(sort_by="self_cuda_time_total", row_limit=60, max_name_column_width=90)
    path.write_text(table)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one JSON object."""
    shape = SHAPES[given.shape]
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        (Path(folder) / "config.json").write_text(json.dumps(COMMON | shape))
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        config = RunConfig(
            cluster=s.ClusterConfig(device="cuda"),
            model=s.ModelConfig(hf_checkpoint=folder),
            training=s.TrainingConfig(lr=1e-6),
            data=s.DataConfig(num_rollout=1, rollout_batch_size=1),
            algorithm=s.AlgorithmConfig(advantage_estimator="grpo"),
            megatron_tokens=("--lr-decay-style", "constant", *given.megatron),
        )
        peak = matrix_peak()
        trainer = RandomTrainer(config, rank=0, world_size=1, master_addr="127.0.0.1", master_port=port)
    held = torch.cuda.memory_allocated()
    batch = batch_of(given.budget, given.micro_batches)
    begun = time.perf_counter()
    trainer.train(batch)
    first = time.perf_counter() - begun
    trainer.train(batch)
    torch.cuda.reset_peak_memory_stats()
    metrics: list[dict[str, float]] = []
    steps = seconds_of(lambda: metrics.append(trainer.train(batch)), given.rounds)
    memory = torch.cuda.max_memory_allocated()
    plans = trainer._packs(batch)
    passes = seconds_of(lambda: trainer._with_log_probs(plans, "old_log_probs"), given.rounds + 1)[1:]
    if given.profile is not None:
        profile(lambda: trainer.train(batch), given.profile)
    forward, tokens = forward_flops(shape, batch), sum(x.length for x in batch.samples)
    step, log_probs = statistics.median(steps), statistics.median(passes)
    trainer.shutdown()
    return {
        "shape": given.shape, "device": torch.cuda.get_device_name(), "torch": torch.__version__, "parameters": trainer.num_parameters,
        "budget": given.budget, "micro_batches": given.micro_batches, "sequences": len(batch.samples), "tokens": tokens,
        "matrix_peak_tflops": peak / 1e12, "first_step_seconds": first, "step_seconds": steps, "log_prob_seconds": passes,
        "step_tok_per_s": tokens / step, "step_tflops": 3 * forward / step / 1e12, "step_share_of_peak": 3 * forward / step / peak,
        "log_prob_tok_per_s": tokens / log_probs, "log_prob_tflops": forward / log_probs / 1e12,
        "log_prob_share_of_peak": forward / log_probs / peak,
        "held_bytes": held, "peak_bytes": memory, "reserved_bytes": torch.cuda.memory_reserved(),
        "grad_norm": metrics[-1]["train/grad_norm"],
    }  # fmt: skip


def main() -> None:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("megatron", nargs="*", help="after --: Megatron's flags")
    given = parser.parse_args()
    text = json.dumps(measure(given), indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
