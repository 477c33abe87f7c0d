"""Makes what the quickstart needs: a small Qwen3 model with its own tokenizer, and an arithmetic task from reasoning-gym.

    python -m examples.quickstart.make_assets runs/quickstart/assets

writes, the same bytes every time:
    model/          Qwen3 architecture, random float32 weights (safetensors), tokenizer with a chat template
    sft.jsonl       conversations with the right answer, for the supervised start
    train.jsonl     prompts for RL; the verifier scores them, their labels are never trained on
    heldout.jsonl   prompts for evaluation
No expression occurs in two of the files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["AssetSpec", "make_assets"]

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
TASK = "basic_arithmetic"  # of reasoning-gym
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# What the byte-pair merges are learnt from: words of chats and of the task. No sums: digits stay single tokens.
TOKENIZER_CORPUS = ("user\n", "assistant\n", "system\n", "+", " +", " -", " =") * 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AssetSpec:
    """Sizes and seeds of the model and of the task."""

    seed: int = 7
    hidden_size: int = 160
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    ffn_size: int = 512
    init_std: float = 0.06  # transformers' 0.02 learns a model this small much more slowly
    max_positions: int = 256
    num_terms: int = 4  # terms of one sum, each from 0 to 9
    num_sft: int = 1500
    num_train: int = 5000
    num_heldout: int = 256


def make_assets(folder: Path, spec: AssetSpec) -> dict[str, Path]:
    """Write the model and the three task files into `folder`; returns their paths by name.

    Raises ValueError when the task has too few different expressions for the sizes asked for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"model": folder / "model"}
    _write_model(paths["model"], spec)
    rows = _distinct_rows(spec)
    for name, count in (("sft", spec.num_sft), ("train", spec.num_train), ("heldout", spec.num_heldout)):
        paths[name] = folder / f"{name}.jsonl"
        part = [next(rows) for _ in range(count)]
        if name == "sft":
            part = [{"input": [*row["input"], {"role": "assistant", "content": row["label"]}]} for row in part]
        paths[name].write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return paths


def _distinct_rows(spec: AssetSpec) -> Iterator[dict[str, Any]]:
    """Rows of the task, each expression once. Columns: input (chat messages), label, metadata (what the verifier needs)."""
    import reasoning_gym  # takes a second; `--help` should not

    wanted = spec.num_sft + spec.num_train + spec.num_heldout
    dataset = reasoning_gym.create_dataset(
        TASK,
        seed=spec.seed,
        size=wanted * 20,
        min_terms=spec.num_terms,
        max_terms=spec.num_terms,
        min_digits=1,
        max_digits=1,
        operators=["+"],
        allow_parentheses=False,
    )
    seen: set[str] = set()
    for entry in dataset:
        expression = entry["metadata"]["expression"]
        if expression in seen or "10" in expression:  # the dataset's "one digit" goes from 0 to 10
            continue
        seen.add(expression)
        yield {
            "input": [{"role": "user", "content": expression.replace(" ", "") + "="}],
            "label": entry["answer"],
            "metadata": {"reasoning_gym": {"dataset": TASK, "entry": entry}},
        }
    raise ValueError(
        f"{TASK} with {spec.num_terms} terms gave {len(seen)} different sums, {wanted} are wanted: ask for fewer rows, or for more terms."
    )


def _write_model(folder: Path, spec: AssetSpec) -> None:
    """A Qwen3 model with random weights, and its tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = _make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_positions,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        initializer_range=spec.init_std,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_tokenizer() -> Any:
    """Byte-level BPE with single digits: 256 bytes, a few merges, the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TOKENIZER_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    """Command line: make_assets.py FOLDER."""
    parser = argparse.ArgumentParser(description="Make the quickstart's model and task files.")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    for name, path in make_assets(arguments.folder, AssetSpec()).items():
        print(f"{name}: {path}")


if __name__ == "__main__":
    main()
