"""Metrics reach every sink, and a resumed run has each step once."""

import json

import pytest

from tests.limits import small_files
from vime.errors import ResourceError
from vime.observability.metrics import MetricsLog, read_metrics


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_metrics_come_back_as_written(tmp_path):
    log = MetricsLog(tmp_path, first_step=0)
    log.log(0, "step", {"a": 1.5})
    log.log(1, "step", {"a": 2.5})
    log.close()
    assert read_metrics(log.path) == {"a": [(0, 1.5), (1, 2.5)]}


def test_a_number_that_is_not_finite_becomes_null(tmp_path):
    log = MetricsLog(tmp_path, first_step=0)
    log.log(0, "step", {"a": float("nan")})
    log.close()
    assert json.loads(log.path.read_text())["a"] is None


def test_resume_drops_steps_that_run_again_and_a_torn_line(tmp_path):
    log = MetricsLog(tmp_path, first_step=0)
    for step in range(4):
        log.log(step, "step", {"a": step})
    log.close()
    with log.path.open("a") as file:
        file.write('{"step": 4, "a"')
    again = MetricsLog(tmp_path, first_step=2)
    again.log(2, "step", {"a": 9})
    again.close()
    assert steps(again.path) == [0, 1, 2]


def test_tensorboard_holds_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, first_step=0, tensorboard_dir=tmp_path / "tb")
    log.log(3, "step", {"train/loss": 0.25})
    log.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    (scalar,) = events.Scalars("train/loss")
    assert (scalar.step, scalar.value) == (3, 0.25)


def test_tensorboard_shows_a_step_that_ran_again_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, values in ((0, (1.0, 2.0, 3.0)), (1, (5.0, 6.0))):
        log = MetricsLog(tmp_path, first_step=first, tensorboard_dir=tmp_path / "tb")
        for step, value in enumerate(values, first):
            log.log(step, "step", {"a": value})
        log.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("a")] == [(0, 1.0), (1, 5.0), (2, 6.0)]


def test_a_full_disk_ends_the_run_with_the_file_and_a_cure_and_the_lines_before_are_kept(tmp_path):
    log = MetricsLog(tmp_path, first_step=0, tensorboard_dir=tmp_path / "tb")
    log.log(0, "step", {"a": 0.0})
    many = {f"metric_{i}": 1.0 for i in range(10_000)}
    with small_files(50_000), pytest.raises(ResourceError, match=r"cannot write .*metrics.jsonl: File too large. Free space"):
        log.log(1, "step", many)
    with small_files(50_000), pytest.raises(ResourceError, match=r"cannot write .*samples.jsonl"):
        log.log_samples(1, "train", [many])
    log.close()
    again = MetricsLog(tmp_path, first_step=1)
    again.log(1, "step", {"a": 1.0})
    again.close()
    assert read_metrics(again.path) == {"a": [(0, 0.0), (1, 1.0)]}


def test_a_log_that_cannot_be_taken_up_again_is_an_error_that_says_so(tmp_path):
    log = MetricsLog(tmp_path, first_step=0)
    log.log(0, "step", {f"metric_{i}": 1.0 for i in range(10_000)})
    log.close()
    before = log.path.read_text()
    with small_files(50_000), pytest.raises(ResourceError, match=r"cannot write .*metrics.jsonl"):
        MetricsLog(tmp_path, first_step=1)
    assert log.path.read_text() == before
    assert not list(tmp_path.glob("*.tmp"))
