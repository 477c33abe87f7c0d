"""A capsule's folder: written beside its name, renamed when it is whole; a torn or foreign one is refused.

step_0000003/
  capsule.json           format, layout, platform, where the state is, the size of every file; written last
  config.yaml            the run's command line, as --config takes it
  samples.jsonl          the step's samples: prompts, responses, tokens, masks, rewards, log-probs (JSON lines)
  prompts.json           the prompts' texts encoded by the run's tokenizer
  results.json           what each stage gave: labels, lengths, digests ...
  results.safetensors    ... and the values
  state/                 weights, optimizer, schedule, random states before the step, unless a commit or the start model has them
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vime import __version__
from vime.capsule.results import Item, load_items
from vime.errors import DataError

__all__ = ["CONFIG", "FORMAT", "SAMPLES", "STATE", "capsule_path", "finish_capsule", "partial_path", "read_capsule", "write_prompts"]

FORMAT = 1
CAPSULE, CONFIG, SAMPLES, PROMPTS, STATE = "capsule.json", "config.yaml", "samples.jsonl", "prompts.json", "state"
AGAIN = "Record the step again."


def capsule_path(folder: str | Path, rollout_id: int) -> Path:
    """Where the capsule of a rollout step stands."""
    return Path(folder) / f"step_{rollout_id:07d}"


def partial_path(folder: str | Path, rollout_id: int) -> Path:
    """Where it is written."""
    path = capsule_path(folder, rollout_id)
    return path.with_name(path.name + ".partial")


def write_prompts(path: Path, labels: Sequence[str], prompt_ids: Sequence[Sequence[int]]) -> None:
    """Write the prompts' token ids, one list for each sample, into the capsule `path`. Raises OSError."""
    (path / PROMPTS).write_text(json.dumps({"labels": list(labels), "prompt_ids": [list(ids) for ids in prompt_ids]}))


def finish_capsule(folder: str | Path, rollout_id: int, facts: dict[str, Any]) -> Path:
    """Write capsule.json with `facts` and the files' sizes, and give the folder its name. Raises OSError, DataError."""
    partial, final = partial_path(folder, rollout_id), capsule_path(folder, rollout_id)
    for name in (SAMPLES, PROMPTS):
        if not (partial / name).is_file():
            raise DataError(f"{name} of the capsule {final} was not written: is {folder} the same folder for all processes?")
    files = {str(f.relative_to(partial)): f.stat().st_size for f in sorted(partial.rglob("*")) if f.is_file()}
    record = {"format": FORMAT, "vime": __version__, "rollout_id": rollout_id, **facts, "files": files}
    (partial / CAPSULE).write_text(json.dumps(record, indent=1))
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)
    return final


def read_capsule(path: Path) -> tuple[dict[str, Any], list[Item]]:
    """(facts, results) of a capsule. Raises DataError when it is missing, torn, or of another kind."""
    try:
        facts = json.loads((path / CAPSULE).read_text())
    except FileNotFoundError:
        there = "it was not finished" if path.name.endswith(".partial") else f"it has no {CAPSULE}"
        raise DataError(f"{path} is no step capsule: {there}. Name a folder that --capsule-steps wrote, like DIR/step_0000003.") from None
    except (OSError, ValueError) as error:
        raise DataError(f"the capsule {path} cannot be read ({error}). {AGAIN}") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("files"), dict):
        raise DataError(f"{path / CAPSULE} is not what --capsule-steps writes. Name a folder that it wrote.")
    if facts.get("format") != FORMAT:
        raise DataError(
            f"the capsule {path} has format {facts.get('format')}, and this vime {__version__} reads {FORMAT}: replay it with "
            f"vime {facts.get('vime')}, which wrote it."
        )
    for name, size in facts["files"].items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise DataError(f"the capsule {path} is torn: {name} {what}. {AGAIN}")
    return facts, [_prompts(path), *load_items(path)]


def _prompts(path: Path) -> Item:
    try:
        read = json.loads((path / PROMPTS).read_text())
        rows = tuple(torch.tensor(ids, dtype=torch.int64) for ids in read["prompt_ids"])
        return Item(stage="tokenize", name="the prompt's tokens", labels=tuple(read["labels"]), rows=rows, exact=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path / PROMPTS} cannot be read ({error}). {AGAIN}") from error
