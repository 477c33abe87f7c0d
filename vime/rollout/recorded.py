"""Samples of a rollout step written to a file, and a rollout function that reads such files instead of generating.

A file is JSON lines: a head {"format", "rollout_id", "groups"}, then one line a group: its members in `Sample.to_dict`'s
form, a fan-out as a list of them. Nothing in it is executed, and what is read equals what was written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vime.errors import ConfigError, DataError, ResourceError
from vime.rollout.base_types import Group, RolloutFnTrainOutput
from vime.rollout.data_source import member_from_plain, member_to_plain

__all__ = ["generate_rollout", "load_groups", "save_groups"]

FORMAT = 1


def save_groups(template: str, rollout_id: int, groups: Sequence[Any]) -> Path:
    """Write the groups of step `rollout_id` to the file that `template` names ({rollout_id} is filled in); whole, or not at all.

    Raises:
        DataError: a sample holds what has no JSON form. ResourceError: the file cannot be written.
    """
    path = Path(template.format(rollout_id=rollout_id))
    head = {"format": FORMAT, "rollout_id": rollout_id, "groups": len(groups)}
    lines = [head, *([member_to_plain(member) for member in (group if isinstance(group, list) else [group])] for group in groups)]
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)
        os.replace(partial, path)
    except OSError as error:
        raise ResourceError(
            f"--save-debug-rollout-data {path} cannot be written ({error.strerror}). Free space, or name another place."
        ) from error
    return path


def load_groups(template: str, rollout_id: int, share: float | None = None) -> list[Group]:
    """The groups that were written for step `rollout_id`; with `share` the first groups only, one at least.

    Raises:
        DataError: there is no file for that step, or it is torn or of another kind.
    """
    path = Path(template.format(rollout_id=rollout_id))
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
