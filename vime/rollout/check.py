"""Looking at the prompt files before anything is started: no tokenizer, no torch, a moment for thousands of rows."""

from __future__ import annotations

from typing import Any

from vime.config.prompt_sources import split_sources
from vime.data.jsonl import Row
from vime.data.prompts import PromptFormat, sample_from_row
from vime.data.tables import open_table
from vime.errors import ConfigError, DataError
from vime.rollout.evaluation import eval_files
from vime.rollout.rm_hub.registry import find_reward, needs_label
from vime.utils.types import Sample

__all__ = ["check_prompt_files"]

CHECKED = 50_000  # rows of a file; those behind them are checked when they are drawn
OUR_ROLLOUT = "vime.rollout.vllm_rollout."  # scores with async_rm; of a user's rollout function that is not known


def check_prompt_files(args: Any) -> None:
    """Read --prompt-data and --eval-prompt-data row by row, as the run will; of a large file the first CHECKED rows.

    Raises:
        DataError: a file is missing or empty, a line malformed, a column, a label or what else the row's reward needs is
            missing, or the row names a reward that there is not (with file:line).
        ConfigError: --rm-type is unknown, --eval-prompt-data is not made of pairs, or --reward-key is of no use.
    """
    if args.rm_type is not None:
        find_reward(args.rm_type)
    key_flags: dict[str, bool] = {}  # flag that names a reward's entry -> whether a reward may have entries
    if args.prompt_data is not None:
        form = PromptFormat.of(args, needs_label=needs_label())
        skip_bad = args.bad_row_policy == "skip"
        for source in split_sources(args.prompt_data):
            keyed = _check(args, source.spec, form, "--prompt-data", args.rollout_function_path, args.reward_key, skip_bad)
            key_flags["--reward-key"] = key_flags.get("--reward-key", False) or keyed
    if args.eval_prompt_data:
        form = PromptFormat.of(args, needs_label=needs_label(), evaluation=True)
        key, flag = (args.eval_reward_key, "--eval-reward-key") if args.eval_reward_key else (args.reward_key, "--reward-key")
        function = args.eval_function_path or args.rollout_function_path
        for name, path in eval_files(args):
            keyed = _check(args, path, form, f"--eval-prompt-data {name}", function, key)
            key_flags[flag] = key_flags.get(flag, False) or keyed
    for flag, used in key_flags.items():
        given = args.reward_key if flag == "--reward-key" else args.eval_reward_key
        if given is not None and not used:
            raise ConfigError(f"{flag} {given} has no effect: the rewards of these prompts are numbers, not dicts. Leave it out.")


def _check(args: Any, spec: str, form: PromptFormat, flag: str, function_path: str, key: str | None, skip_bad: bool = False) -> bool:
    """Check one file; whether a reward of its rows may give a dict, as far as is known."""
    scored = args.custom_rm_path is None and function_path.startswith(OUR_ROLLOUT)
    keyed = not scored or args.custom_generate_function_path is not None  # which may set rewards itself
    table = open_table(spec, flag=flag)
    for number in range(min(len(table), CHECKED)):
        try:
            row = table.row(number)
            sample = sample_from_row(row, form)
        except DataError:
            if not skip_bad:
                raise
            continue
        if scored:
            keyed |= _check_reward(args, sample, row, key)
    return keyed


def _check_reward(args: Any, sample: Sample, row: Row, key: str | None) -> bool:
    """The row's reward exists and finds in the row what it needs (labels apart, which `sample_from_row` has seen to).

    Returns whether it may give a dict; then `key` must be one of its entries.
    """
    named = sample.metadata.get("rm_type")
    name = named or args.rm_type
    if not name:
        if args.custom_generate_function_path is not None:
            return True  # which may set rewards itself
        raise DataError(f"{row.where}: no reward: the row has no metadata['rm_type'], and neither --rm-type nor --custom-rm-path is given.")
    try:
        spec = find_reward(str(name), "metadata['rm_type']" if named else "--rm-type")
    except ConfigError as error:
        raise DataError(f"{row.where}: {error}") from error
    problem = spec.lacks(args, sample)
    if problem:
        raise DataError(f"{row.where}: reward '{name}' {problem}")
    if spec.entries and key not in spec.entries:
        has = "is not given" if key is None else f"is {key}"
        raise DataError(
            f"{row.where}: reward '{name}' gives a dict with {', '.join(spec.entries)}, and --reward-key {has}: name one of them."
        )
    return spec.entries != ()
