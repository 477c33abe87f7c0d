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

import contextlib
import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vime.errors import CheckpointError, ResourceError

__all__ = ["LATEST", "Commit", "OpenCommit", "Pending", "begin_commit", "check_commit", "commit_of_step", "latest_commit"]

log = logging.getLogger(__name__)
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


def commit_of_step(folder: Path, rollout_id: int) -> Commit:
    """The complete commit of one step. Raises CheckpointError when it is torn, or not there."""
    path = folder / f"iter_{rollout_id:07d}"
    if not path.is_dir():
        there = [str(int(p.parent.name.removeprefix("iter_"))) for p in sorted(folder.glob("iter_???????/commit.json"))]
        raise CheckpointError(f"{folder} holds no commit of step {rollout_id}; there are: {', '.join(there) or 'none'}.")
    return check_commit(path)


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


class Pending(Protocol):
    """A part of a commit that is being written in the background."""

    def is_written(self) -> bool:
        """Whether the writing has ended, well or not."""

    def finish(self) -> None:
        """Wait for the writing and make the part complete. Raises what went wrong."""


class OpenCommit:
    """A commit that is being written into `iter_N.tmp`. `finish` makes it one; until then the one before is the newest."""

    def __init__(self, folder: Path, rollout_id: int, *, weight_version: int, keep: int) -> None:
        self.rollout_id = rollout_id
        self._folder, self._weight_version, self._keep = folder, weight_version, keep
        self._final = folder / f"iter_{rollout_id:07d}"
        self._temporary = self._final.with_name(self._final.name + ".tmp")
        self._parts: list[str] = []
        self._pending: list[Pending] = []

    def begin(self, writers: Mapping[str, Callable[[str], Pending | None]]) -> None:
        """Let each part of `writers` write into a folder of its own; what goes on in the background is returned by its writer."""
        with self._given_up_on_error():
            self._folder.mkdir(parents=True, exist_ok=True)
            for stale in self._folder.glob("iter_*.tmp"):
                shutil.rmtree(stale)
            _check_space(self._folder)
            for part, write in writers.items():
                (self._temporary / part).mkdir(parents=True)
                self._parts.append(part)
                if (pending := write(str(self._temporary / part))) is not None:
                    self._pending.append(pending)

    def is_written(self) -> bool:
        """Whether `finish` would not wait."""
        return all(pending.is_written() for pending in self._pending)

    def finish(self) -> Commit:
        """Wait for what is written in the background, make this the newest commit, and drop all but the newest `keep`."""
        with self._given_up_on_error():
            for pending in self._pending:
                pending.finish()
            self._check_parts()
            self._publish()
        commits = sorted(p for p in self._folder.glob("iter_*") if (p / "commit.json").exists())
        position = commits.index(self._final)
        # later ones belong to a future that was given up
        for old in commits[: max(0, position + 1 - self._keep)] + commits[position + 1 :]:
            _remove(old)
        return Commit(path=self._final, rollout_id=self.rollout_id, weight_version=self._weight_version)

    def _check_parts(self) -> None:
        for part in self._parts:
            folder = self._temporary / part
            if not any(file.is_file() for file in folder.rglob("*")):
                raise CheckpointError(
                    f"commit {self._final}: the {part} wrote nothing into {folder}. Is {self._folder} the same folder on every node?"
                )

    def _publish(self) -> None:
        found = sorted(self._temporary.rglob("*"))
        files = {str(f.relative_to(self._temporary)): f.stat().st_size for f in found if f.is_file()}
        record = {"rollout_id": self.rollout_id, "weight_version": self._weight_version, "files": files}
        _write_synced(self._temporary / "commit.json", json.dumps(record, indent=1))
        if self._final.exists():
            _remove(self._final)
        os.replace(self._temporary, self._final)
        _sync_folder(self._folder)  # the name must not be on disk before what it names
        _write_synced(self._folder / (LATEST + ".tmp"), self._final.name)
        os.replace(self._folder / (LATEST + ".tmp"), self._folder / LATEST)
        _sync_folder(self._folder)

    @contextlib.contextmanager
    def _given_up_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            shutil.rmtree(self._temporary, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            cure = "Free space" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "Mend that"
            raise ResourceError(
                f"commit {self._final} could not be written: {error}. Earlier commits are intact. {cure} and run the same command again."
            ) from error


def begin_commit(
    folder: Path, rollout_id: int, *, weight_version: int, writers: Mapping[str, Callable[[str], Pending | None]], keep: int
) -> OpenCommit:
    """Begin a commit with `writers` ({"trainer": save_to_path, "rollout": ...}); `finish` of what is returned completes it.

    Raises ResourceError when the disk is full, as `finish` does; the commits that were there stay valid.
    """
    commit = OpenCommit(folder, rollout_id, weight_version=weight_version, keep=keep)
    commit.begin(writers)
    return commit


def _remove(commit: Path) -> None:
    """Delete a commit; first it gets a name that makes it none, and by which the next commit finds what a crash left of it."""
    going = commit.with_name(commit.name + ".old.tmp")
    try:
        commit.rename(going)
        shutil.rmtree(going)
    except OSError as error:
        log.warning("the old commit %s could not be removed: %s. No other depends on it; the next commit tries again.", commit, error)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
