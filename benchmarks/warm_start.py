"""A short supervised start of the quickstart's model in plain transformers, so that both sides begin with the same weights.

python -m benchmarks.warm_start MODEL SFT.jsonl OUT
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.workload import flag_value
from examples.quickstart import recipe

__all__ = ["warm_start"]

IGNORED = -100  # the label that transformers' loss leaves out


def warm_start(model_path: Path, rows_path: Path, out: Path) -> float:
    """Train on the worked answers of `rows_path` and save model and tokenizer to `out`; returns the last loss (nats per token).

    Steps, batch size and optimizer are those of the quickstart's supervised start.
    """
    flags = recipe.sft_flags(Path())
    steps, batch = int(flag_value("--num-rollout", "1", flags)), int(flag_value("--rollout-batch-size", "64", flags))
    lr, beta2 = float(flag_value("--lr", "1e-3", flags)), float(flag_value("--adam-beta2", "0.999", flags))
    torch.manual_seed(7)
    order = random.Random(7)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    rows = [json.loads(line) for line in rows_path.read_text(encoding="utf-8").splitlines()]
    examples = [_tokens(tokenizer, row) for row in rows]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, beta2), weight_decay=0.01)
    last = float("nan")
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 10)
        ids, labels = _batch(order.sample(examples, min(batch, len(examples))), tokenizer.pad_token_id)
        loss = model(input_ids=ids, labels=labels, attention_mask=(ids != tokenizer.pad_token_id).long()).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        last = loss.item()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return last


def _tokens(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """(prompt, answer) token ids of one row, whose last message is the answer."""
    *asked, answer = row["input"]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    return list(prompt), [*tokenizer.encode(answer["content"]), tokenizer.eos_token_id]


def _batch(examples: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids [B, T] int64, and labels [B, T] int64 that are IGNORED outside the answers."""
    longest = max(len(prompt) + len(answer) for prompt, answer in examples)
    ids = torch.full((len(examples), longest), pad)
    labels = torch.full((len(examples), longest), IGNORED)
    for row, (prompt, answer) in enumerate(examples):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return ids, labels


def main() -> None:
    """Command line: warm_start MODEL SFT.jsonl OUT."""
    parser = argparse.ArgumentParser(description="Supervised start of a small model.")
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    print(f"supervised start: loss {warm_start(arguments.model, arguments.rows, arguments.out):.3f}")


if __name__ == "__main__":
    main()
