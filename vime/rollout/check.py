"""Looking at the prompt files before anything is started: no tokenizer, no torch, a moment for thousands of rows."""

from __future__ import annotations

from typing import Any

from vime.data.jsonl import read_rows
from vime.data.prompts import PromptFormat, sample_from_row
from vime.rollout.evaluation import eval_files
from vime.rollout.rm_hub.registry import find_reward, needs_label

__all__ = ["check_prompt_files"]


def check_prompt_files(args: Any) -> None:
    """Read --prompt-data and --eval-prompt-data row by row, as the run will.

    Raises:
        DataError: a file is missing or empty, a line malformed, a column or a label missing (with file:line).
        ConfigError: --rm-type is unknown, or --eval-prompt-data is not made of pairs.
    """
    if args.rm_type is not None:
        find_reward(args.rm_type)
    if args.prompt_data is not None:
        _check(args.prompt_data, PromptFormat.of(args, needs_label=needs_label()), "--prompt-data")
    if args.eval_prompt_data:
        form = PromptFormat.of(args, needs_label=needs_label(), evaluation=True)
        for name, path in eval_files(args):
            _check(path, form, f"--eval-prompt-data {name}")


def _check(spec: str, form: PromptFormat, flag: str) -> None:
    for row in read_rows(spec, flag=flag):
        sample_from_row(row, form)
