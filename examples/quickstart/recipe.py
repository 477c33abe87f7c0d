"""The quickstart's two command lines: a supervised start, then GRPO."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

__all__ = ["grpo_flags", "sft_flags", "shown"]

SFT_STEPS = 100
GRPO_STEPS = 200

_ADAM = ("--lr-decay-style", "constant", "--adam-beta2", "0.95", "--weight-decay", "0.01", "--clip-grad", "1.0")


def sft_flags(folder: Path) -> list[str]:
    """`vime train` flags of the supervised start: conversations in, no engine, cross-entropy on the answers."""
    return [
        *("--hf-checkpoint", str(folder / "assets" / "model"), "--prompt-data", str(folder / "assets" / "sft.jsonl")),
        *("--debug-train-only", "--rollout-function-path", "vime.rollout.sft_rollout.generate_rollout"),
        *("--loss-type", "sft_loss", "--disable-compute-advantages-and-returns", "--rollout-shuffle"),
        *("--rollout-batch-size", "64", "--num-rollout", str(SFT_STEPS)),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192"),
        *("--lr", "2e-3", "--lr-warmup-iters", "10", *_ADAM),
        *("--save", str(folder / "sft"), "--save-hf", str(folder / "sft" / "hf")),
    ]


def grpo_flags(folder: Path, steps: int = GRPO_STEPS) -> list[str]:
    """`vime train` flags of the RL run: 128 sums a step, 4 answers each, the verifier as reward."""
    return [
        *("--hf-checkpoint", str(folder / "sft" / "hf"), "--prompt-data", str(folder / "assets" / "train.jsonl")),
        *("--apply-chat-template", "--rollout-shuffle", "--label-key", "label"),
        *("--custom-rm-path", "examples.quickstart.reward.verified", "--advantage-estimator", "grpo"),
        *("--rollout-batch-size", "128", "--n-samples-per-prompt", "4", "--num-rollout", str(steps)),
        *("--rollout-max-response-len", "8", "--rollout-max-context-len", "48", "--rollout-skip-special-tokens"),
        *("--eval-prompt-data", "heldout", str(folder / "assets" / "heldout.jsonl"), "--eval-interval", "10", "--eval-temperature", "0"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192"),
        *("--lr", "3e-4", "--lr-warmup-iters", str(min(5, steps - 1)), *_ADAM),  # shorter when the run is
        *("--save", str(folder / "grpo"), "--save-interval", "20", "--save-hf", str(folder / "hf"), "--use-tensorboard"),
    ]


def shown(flags: Sequence[str]) -> str:
    """The command line as a user types it, one flag a line."""
    lines = ["vime train"]
    for token in flags:
        if token.startswith("--"):
            lines.append(f"    {token}")
        else:
            lines[-1] += " " + shlex.quote(token)
    return " \\\n".join(lines)
