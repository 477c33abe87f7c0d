"""Commits of a run: in the foreground, in the background, and when something goes wrong beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vime.checkpoint import latest_commit
from vime.cli.record import RunRecord
from vime.config import RunConfig
from vime.config.sections import CheckpointConfig
from vime.errors import CheckpointError, ResourceError

STEPS = 6
Record = Callable[..., RunRecord]


class Part:
    """A trainer's part that is written when the test says so."""

    def __init__(self, path: str) -> None:
        self.path, self.written, self.error = Path(path), False, None

    def is_written(self) -> bool:
        return self.written

    def finish(self) -> None:
        if self.error is not None:
            raise self.error
        (self.path / "state").write_text("state")


class Trainer:
    """Writes in the background; its exports fail when they are to."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.export_error: Exception | None = None

    def begin(self, path: str) -> Part:
        self.parts.append(Part(path))
        return self.parts[-1]

    def writers(self) -> dict[str, Any]:
        return {"trainer": self.begin}

    def save_hf(self, path: str) -> None:
        if self.export_error is not None:
            raise self.export_error


class Rollout:
    def save(self, path: str, step: int) -> None:
        Path(path, "cursor").write_text(str(step))


@pytest.fixture
def record_in(tmp_path: Path) -> Iterator[Callable[..., RunRecord]]:
    """record_in(**of_checkpoint): a run's record in the test's folder."""
    made = []

    def build(**checkpoint: Any) -> RunRecord:
        config = RunConfig(checkpoint=CheckpointConfig(**{"save": str(tmp_path), "save_interval": 2, "async_save": True, **checkpoint}))
        made.append(RunRecord(config, tmp_path, first_step=0, num_steps=STEPS))
        return made[-1]

    yield build
    for record in made:
        record.close()


def newest(folder: Path) -> int | None:
    commit = latest_commit(folder)
    return None if commit is None else commit.rollout_id


def test_a_commit_in_the_background_is_there_at_the_end_of_the_step_in_which_it_is_written(record_in: Record, tmp_path: Path) -> None:
    record, trainer = record_in(), Trainer()
    record.commit(1, trainer, Rollout())
    assert newest(tmp_path) is None
    record.finish_step(2, {}, {}, [])
    assert newest(tmp_path) is None
    trainer.parts[0].written = True
    record.finish_step(3, {}, {}, [])
    assert newest(tmp_path) == 1
    commit = latest_commit(tmp_path)
    assert commit is not None
    assert (commit.rollout / "cursor").read_text() == "1"


def test_one_save_is_in_flight_and_the_next_waits_for_it_and_says_so(
    record_in: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, trainer = record_in(), Trainer()
    record.commit(1, trainer, Rollout())
    record.commit(3, trainer, Rollout())
    assert newest(tmp_path) == 1
    assert "the commit of step 2 is still being written: waiting for it" in "".join(capsys.readouterr())
    assert len(trainer.parts) == 2


@pytest.mark.parametrize(("step", "async_save"), [(STEPS - 1, True), (1, False)])
def test_the_last_commit_and_one_in_the_foreground_are_waited_for(record_in: Record, tmp_path: Path, step: int, async_save: bool) -> None:
    record = record_in(async_save=async_save)
    record.commit(step, Trainer(), Rollout())
    assert newest(tmp_path) == step


def test_a_write_that_failed_ends_the_run_at_the_end_of_the_step_with_the_commit_before(record_in: Record, tmp_path: Path) -> None:
    record, trainer = record_in(), Trainer()
    record.commit(1, trainer, Rollout())
    record.commit(3, trainer, Rollout())
    trainer.parts[1].error, trainer.parts[1].written = ResourceError("no space left"), True
    with pytest.raises(ResourceError, match="no space left"):
        record.finish_step(4, {}, {}, [])
    assert newest(tmp_path) == 1
    record.finish_commit()  # as a run does that ends: nothing is left to complete
    assert not list(tmp_path.glob("*.tmp"))


def test_an_export_that_failed_is_told_when_the_commit_is_complete(record_in: Record, tmp_path: Path) -> None:
    record, trainer = record_in(save_hf=str(tmp_path / "hf")), Trainer()
    trainer.export_error = ResourceError("the Hugging Face folder could not be written")
    with pytest.raises(
        CheckpointError, match="the commit of step 2 is complete, but --save-hf could not be written: the Hugging Face folder"
    ):
        record.commit(1, trainer, Rollout())
    assert newest(tmp_path) == 1


@pytest.mark.parametrize(
    ("error", "written", "kept"),
    [
        (ResourceError("an engine"), False, 1),
        (OSError("a disk"), False, 1),
        (KeyboardInterrupt(), True, 1),
        (KeyboardInterrupt(), False, None),
        (ValueError("in a hook"), True, 1),
        (ValueError("in a hook"), False, None),
    ],
)
def test_what_a_run_that_ends_early_has_written_is_kept(
    record_in: Record, tmp_path: Path, error: BaseException, written: bool, kept: int | None
) -> None:
    record, trainer = record_in(), Trainer()

    def ended() -> None:
        with record.commit_kept():
            record.commit(1, trainer, Rollout())
            trainer.parts[0].written = written
            raise error

    with pytest.raises(type(error)) as caught:
        ended()
    assert caught.value is error
    assert newest(tmp_path) == kept


@pytest.mark.parametrize("second", [ResourceError("no space left"), OSError("no space left")])
def test_a_commit_that_fails_after_the_run_has_does_not_hide_why_it_ended(record_in: Record, tmp_path: Path, second: Exception) -> None:
    record, trainer = record_in(), Trainer()

    def ended() -> None:
        with record.commit_kept():
            record.commit(1, trainer, Rollout())
            trainer.parts[0].written, trainer.parts[0].error = True, second
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ended()
    assert newest(tmp_path) is None
