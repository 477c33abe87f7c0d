"""Commits: model, optimizer, data cursor, buffer and step, saved as one. A half-written commit is never loaded.

    <save>/
      iter_0000005/            written as iter_0000005.tmp, renamed when complete
        trainer/               Megatron's distributed checkpoint: weights, optimizer, RNG, schedule
        rollout/               data source: cursor, buffer
        commit.json            rollout_id, versions, and the size of every file
      latest_checkpointed_iteration.txt     replaced atomically, last of all

Resuming reads the latest name, checks every file's size against commit.json, and refuses a torn commit.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.errors import CheckpointError, ResourceError

__all__ = ["LATEST", "Commit", "check_commit", "latest_commit", "write_commit"]

LATEST = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A complete saved state."""

    path: Path
    rollout_id: int  # the last step that it contains
    weight_version: int

    @property
    def trainer(self) -> Path:
        """Megatron's part; the whole, where weights alone were converted (`vime convert --to megatron`)."""
        return self.path if (self.path / "metadata.json").is_file() else self.path / "trainer"

    @property
    def rollout(self) -> Path:
        """The data source's part."""
        return self.path / "rollout"


def latest_commit(folder: Path) -> Commit | None:
    """The newest complete commit of a run's folder; None when there is none. Raises CheckpointError when it is torn."""
    pointer = folder / LATEST
    if not pointer.exists():
        return None
    name = pointer.read_text().strip()
    path = folder / name
    others = sorted(p.name for p in folder.glob("iter_*") if p.name != name and (p / "commit.json").exists())
    cure = (
        f"Write '{others[-1]}' into {pointer} to go back to that commit."
        if others
        else "No other commit is there: start anew in an empty folder."
    )
    return check_commit(path, named_by=pointer, cure=cure)


def check_commit(path: Path, *, named_by: Path | None = None, cure: str = "Name another commit.") -> Commit:
    """The commit in the folder `path`, all files of which are whole. Raises CheckpointError when it is torn."""
    try:
        record = json.loads((path / "commit.json").read_text())
        files = record["files"]
        commit = Commit(path=path, rollout_id=int(record["rollout_id"]), weight_version=int(record["weight_version"]))
    except (OSError, ValueError, KeyError) as error:
        who = f"commit {path}" if named_by is None else f"{named_by} names '{path.name}'"
        raise CheckpointError(f"{who}: its commit.json cannot be read ({error}). {cure}") from error
    if not files:
        raise CheckpointError(f"commit {path} is torn: it holds no files. {cure}")
    for relative, size in files.items():
        file = path / relative
        found = file.stat().st_size if file.exists() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise CheckpointError(f"commit {path} is torn: {relative} {what}. {cure}")
    return commit


def write_commit(
    folder: Path,
    rollout_id: int,
    *,
    weight_version: int,
    writers: dict[str, Callable[[str], Any]],
    keep: int,
    extra: dict[str, Any] | None = None,
) -> Commit:
    """Write one commit with `writers` ({"trainer": save_to_path, "rollout": ...}), then drop all but the newest `keep`.

    Raises ResourceError when the disk is full; the commits that were there stay valid.
    """
    name = f"iter_{rollout_id:07d}"
    temporary, final = folder / f"{name}.tmp", folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("iter_*.tmp"):
            shutil.rmtree(stale)
        _check_space(folder)
        for part, write in writers.items():
            (temporary / part).mkdir(parents=True)
            write(str(temporary / part))
            if not any(file.is_file() for file in (temporary / part).rglob("*")):
                raise CheckpointError(
                    f"commit {final}: the {part} wrote nothing into {temporary / part}. Is {folder} the same folder on every node?"
                )
        files = {str(f.relative_to(temporary)): f.stat().st_size for f in sorted(temporary.rglob("*")) if f.is_file()}
        record = {"rollout_id": rollout_id, "weight_version": weight_version, "files": files, **(extra or {})}
        _write_synced(temporary / "commit.json", json.dumps(record, indent=1))
        if final.exists():
            shutil.rmtree(final)
        os.replace(temporary, final)
        _write_synced(folder / (LATEST + ".tmp"), name)
        os.replace(folder / (LATEST + ".tmp"), folder / LATEST)
    except OSError as error:
        cure = "Free space" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "Mend that"
        raise ResourceError(
            f"commit {final} could not be written: {error}. Earlier commits are intact. {cure} and run the same command again."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    commits = sorted(p for p in folder.glob("iter_*") if (p / "commit.json").exists())
    position = commits.index(final)
    for old in commits[: max(0, position + 1 - keep)] + commits[position + 1 :]:  # later ones belong to a future that was given up
        shutil.rmtree(old)
    return Commit(path=final, rollout_id=rollout_id, weight_version=weight_version)


def _check_space(folder: Path) -> None:
    """Refuse to begin a commit that cannot fit, judged by the size of the newest one."""
    done = sorted(p for p in folder.glob("iter_*") if (p / "commit.json").exists())
    if not done:
        return
    needed = sum(json.loads((done[-1] / "commit.json").read_text())["files"].values())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"{folder} has {free / 1e6:.0f} MB free, and a commit takes {needed / 1e6:.0f} MB. "
            "Earlier commits are intact: free space (or lower --keep-checkpoints) and run the same command again."
        )


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
