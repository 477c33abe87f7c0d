"""Samples of a rollout step written to a file, and a rollout function that reads such files instead of generating.

A file is JSON lines: a head {"format", "rollout_id", "groups"}, then one line a group: its members in `Sample.to_dict`'s
form, a fan-out as a list of them. Nothing in it is executed, and what is read equals what was written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vime.capsule.folder import SAMPLES, partial_path, write_prompts
from vime.config import RunConfig
from vime.data.tokenizer import encode_prompt, load_tokenizer
from vime.errors import CheckpointError, ConfigError, DataError, ResourceError
from vime.rollout.base_types import Group, RolloutFnTrainOutput
from vime.rollout.batches import flat_samples
from vime.rollout.data_source import member_from_plain, member_to_plain
from vime.utils.types import Sample

__all__ = ["generate_rollout", "load_groups", "read_groups", "record_samples", "save_groups"]

logger = logging.getLogger(__name__)

FORMAT = 1


def save_groups(template: str, rollout_id: int, groups: Sequence[Any]) -> Path:
    """Write the groups of step `rollout_id` to the file that `template` names ({rollout_id} is filled in); whole, or not at all.

    Raises:
        DataError: a sample holds what has no JSON form. ResourceError: the file cannot be written.
    """
    path = Path(template.format(rollout_id=rollout_id))
    lines = _lines(rollout_id, groups)
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(lines, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()  # it would take the space that is wanting
        raise ResourceError(
            f"the samples of step {rollout_id} cannot be written to {path} ({error.strerror}). Free space, or name another place with "
            "--save-debug-rollout-data or --dump-details."
        ) from error
    return path


def _lines(rollout_id: int, groups: Sequence[Any]) -> str:
    head = {"format": FORMAT, "rollout_id": rollout_id, "groups": len(groups)}
    rows = [[member_to_plain(member) for member in (group if isinstance(group, list) else [group])] for group in groups]
    return "".join(json.dumps(line) + "\n" for line in (head, *rows))


def record_samples(config: RunConfig, rollout_id: int, groups: Sequence[Any]) -> None:
    """The samples' part of a step capsule: themselves, and their prompts encoded anew.

    A capsule that cannot be written is given up with a warning.
    """
    folder = partial_path(str(config.capsule_folder), rollout_id)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SAMPLES).write_text(_lines(rollout_id, groups), encoding="utf-8")
        tokenizer = load_tokenizer(config.model.hf_checkpoint)
        samples = list(flat_samples(groups))
        labels = [f"sample {sample.index}" for sample in samples]
        write_prompts(folder, labels, [_encoded(tokenizer, sample) for sample in samples])
    except (OSError, DataError, CheckpointError) as error:
        logger.warning("no capsule of rollout step %d: %s", rollout_id, error)
        shutil.rmtree(folder, ignore_errors=True)


def _encoded(tokenizer: Any, sample: Sample) -> list[int]:
    """Token ids of the sample's prompt; none of one that is no text for this tokenizer."""
    try:
        kwargs = sample.apply_chat_template_kwargs or {}
        return encode_prompt(tokenizer, sample.prompt, tools=sample.metadata.get("tools"), **kwargs)
    except DataError:
        return []


def load_groups(template: str, rollout_id: int, share: float | None = None) -> list[Group]:
    """The groups that were written for step `rollout_id`; with `share` the first groups only, one at least.

    Raises:
        DataError: there is no file for that step, or it is torn or of another kind.
    """
    path = Path(template.format(rollout_id=rollout_id))
    return read_groups(path, rollout_id, share)


def read_groups(path: Path, rollout_id: int, share: float | None = None) -> list[Group]:
    """The groups in the file `path`; else as `load_groups`."""
    try:
        head, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError as error:
        raise DataError(
            f"--load-debug-rollout-data {path}: there is no recorded step {rollout_id}. Record it with --save-debug-rollout-data, or "
            "lower --num-rollout to the steps there are."
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"--load-debug-rollout-data {path} cannot be read ({error}). Record the step again.") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT or head.get("groups") != len(rows):
        raise DataError(f"--load-debug-rollout-data {path}: not a whole file of --save-debug-rollout-data. Record the step again.")
    taken = rows if share is None else rows[: max(1, math.floor(share * len(rows)))]
    return [[member_from_plain(member) for member in row] for row in taken]


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """The recorded samples of step `rollout_id` (--load-debug-rollout-data)."""
    if evaluation:
        raise ConfigError("recorded rollouts cannot evaluate: there are no engines. Leave --load-debug-rollout-data out.")
    groups = load_groups(args.load_debug_rollout_data, rollout_id, args.load_debug_rollout_data_subsample)
    return RolloutFnTrainOutput(samples=groups, metrics={"rollout/recorded_groups": float(len(groups))})
