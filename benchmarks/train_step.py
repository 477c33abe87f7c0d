"""Forward and backward pass of the trainer against transformers, on the same CPU, model and samples, in one process in turns.

    python -m benchmarks.train_step [--rounds 9] [--threads 2] [--out benchmarks/results/train_step.json]

Two batches, each as both sides would take it:

    even      16 distinct sequences of 256 tokens, all of them trained (supervised): padding costs transformers nothing
    groups    8 prompts of 96 tokens with 8 responses each, of 4 to 64 tokens (GRPO): transformers pads and repeats the prompts,
              the trainer packs, computes a group's prompt once, and no logits but those of the responses

The loss is the same, the mean negative log-likelihood of the trained tokens; both sides' losses and gradient norms are compared first.
transformers computes it as its users do: logits of all positions (SDPA attention), cross-entropy. No optimizer step on either side.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import describe_machine, wait_quiet
from vime.backends.megatron_utils.actor import MegatronTrainer
from vime.backends.megatron_utils.loss import loss_from_logits
from vime.backends.megatron_utils.step import forward_backward
from vime.config import sections as s
from vime.config.run import RunConfig
from vime.packing.pack import PackedBatch, pack
from vime.types import StepPlan, TrainSample

VOCAB = 4096
MODEL = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
CLOSE = 1e-4  # relative: both sides compute the same


def samples_of(kind: str) -> list[tuple[np.ndarray[Any, Any], int]]:
    """(tokens, how many of them at the end are trained) of each sequence."""
    rng = np.random.default_rng(0)
    if kind == "even":
        return [(rng.integers(0, VOCAB, 256), 255) for _ in range(16)]
    prompts = [rng.integers(0, VOCAB, 96) for _ in range(8)]
    lengths = [(prompt, int(rng.integers(4, 65))) for prompt in prompts for _ in range(8)]
    return [(np.concatenate([prompt, rng.integers(0, VOCAB, length)]), length) for prompt, length in lengths]


def our_batch(samples: list[tuple[np.ndarray[Any, Any], int]]) -> PackedBatch:
    """One packed micro-batch; each trained token weighs the same."""
    trained = float(sum(response for _, response in samples))
    rows = [
        TrainSample(
            tokens=tokens, response_length=response, loss_mask=np.ones(response, np.float32), reward=0.0, raw_reward=0.0, sample_id=i,
            group_id=0, rollout_id=i, rollout_mask_sum=float(response),
        )
        for i, (tokens, response) in enumerate(samples)
    ]  # fmt: skip
    plan = StepPlan(micro_batches=(tuple(range(len(rows))),), num_rollouts=len(rows), num_tokens=trained)
    return pack(rows, plan, aggregation="token")


def their_step(model: torch.nn.Module, samples: list[tuple[np.ndarray[Any, Any], int]]) -> Callable[[], float]:
    """transformers' forward and backward on the padded batch."""
    longest = max(len(tokens) for tokens, _ in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    mask = torch.zeros_like(ids)
    for row, (tokens, response) in enumerate(samples):
        ids[row, : len(tokens)] = torch.from_numpy(tokens)
        mask[row, : len(tokens)] = 1
        labels[row, len(tokens) - response : len(tokens)] = ids[row, len(tokens) - response : len(tokens)]
    batch = {"input_ids": ids, "labels": labels} | ({} if bool(mask.all()) else {"attention_mask": mask})

    def step() -> float:
        model.zero_grad(set_to_none=False)
        loss = model(**batch).loss
        loss.backward()
        return float(loss)

    return step


def our_step(trainer: MegatronTrainer, packed: PackedBatch) -> Callable[[], float]:
    """The trainer's forward and backward on the packed batch."""
    algorithm = s.AlgorithmConfig(loss_type="sft_loss")

    def loss(logits: torch.Tensor, micro: PackedBatch, rows: torch.Tensor | None) -> Any:
        return loss_from_logits(logits, micro, algorithm, temperature=1.0, vocab_size=VOCAB, rows=rows)

    def step() -> float:
        for chunk in trainer._model:
            chunk.zero_grad_buffer()
        return float(forward_backward(trainer._model, [packed], loss, whole=False)[0]["loss"])

    return step


def norm(gradients: list[torch.Tensor]) -> float:
    return float(torch.stack([gradient.float().norm() for gradient in gradients]).norm())


def measure(kind: str, trainer: MegatronTrainer, theirs: torch.nn.Module, rounds: int) -> dict[str, Any]:
    """Seconds of both sides, round by round in turns, after a warm-up in which their results are compared."""
    samples = samples_of(kind)
    steps = {"vime": our_step(trainer, our_batch(samples)), "transformers": their_step(theirs, samples)}
    losses = {name: step() for name, step in steps.items()}
    norms = {
        "vime": norm([p.main_grad for chunk in trainer._model for p in chunk.parameters()]),
        "transformers": norm([p.grad for p in theirs.parameters() if p.grad is not None]),
    }
    for found in (losses, norms):
        if abs(found["vime"] - found["transformers"]) > CLOSE * abs(found["transformers"]):
            raise SystemExit(f"{kind}: the sides do not compute the same: {losses}, gradient norms {norms}")
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - begun)
    best = {name: min(values) for name, values in seconds.items()}
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "tokens": sum(len(tokens) for tokens, _ in samples), "losses": losses, "gradient_norms": norms, "seconds": seconds,
        "ratio_of_best": best["vime"] / best["transformers"], "ratio_of_medians": median["vime"] / median["transformers"],
    }  # fmt: skip


def make_trainer(folder: Path, threads: int, shape: dict[str, Any]) -> tuple[MegatronTrainer, torch.nn.Module]:
    """One trainer process, and the model of transformers in `folder` from whose weights it starts."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    theirs: Any = Qwen3ForCausalLM(Qwen3Config(**shape))
    theirs.save_pretrained(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = RunConfig(
        model=s.ModelConfig(hf_checkpoint=str(folder)),
        training=s.TrainingConfig(train_threads=threads),
        data=s.DataConfig(num_rollout=1, rollout_batch_size=1),
    )
    return MegatronTrainer(config, rank=0, world_size=1, master_addr="127.0.0.1", master_port=port), theirs


def main() -> None:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer, theirs = make_trainer(Path(folder), given.threads, MODEL)
        busy = wait_quiet(30.0)
        theirs.train()
        results = {kind: measure(kind, trainer, theirs, given.rounds) for kind in ("even", "groups")}
        trainer.shutdown()
    out = {"machine": describe_machine(), "others_busy_cores": busy, "threads": given.threads, "model": MODEL, "results": results}
    text = json.dumps(out, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
