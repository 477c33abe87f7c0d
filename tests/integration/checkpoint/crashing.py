"""Saves two commits in FOLDER/N, and dies at the N-th time that the second one touches the disk; one N after the other until none dies.

    python crashing.py FOLDER

No exit handler runs and nothing is flushed, as with kill -9. Prints how many died.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from vime.checkpoint import begin_commit

TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
DIED = 77


class Part:
    """The trainer's part: one file at once, one in the background."""

    def __init__(self, step: int) -> None:
        self._step = step

    def begin(self, path: str) -> Part:
        self._path = Path(path)
        (self._path / "at_once").write_text(f"state {self._step}")
        return self

    def is_written(self) -> bool:
        return True

    def finish(self) -> None:
        (self._path / "later").write_text(f"more of {self._step}")


def save(folder: Path, step: int) -> None:
    def rollout(path: str) -> None:
        Path(path, "cursor").write_text(f"cursor {step}")

    begin_commit(folder, step, weight_version=step + 1, writers={"trainer": Part(step).begin, "rollout": rollout}, keep=1).finish()


def die_at(count: int) -> None:
    """End this process when it touches the disk for the `count`-th time from now on."""
    left = count

    def hook(event: str, _args: object) -> None:
        nonlocal left
        if event in TOUCHES:
            left -= 1
            if left == 0:
                os._exit(DIED)

    sys.addaudithook(hook)


def main() -> None:
    base, number = Path(sys.argv[1]), 0
    while True:
        number += 1
        folder = base / f"{number:03d}"
        child = os.fork()
        if child == 0:
            save(folder, 0)
            die_at(number)
            save(folder, 1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            break
        assert code == DIED, code
    print(number - 1)


if __name__ == "__main__":
    main()
