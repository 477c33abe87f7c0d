"""The one place that metrics are sent from. Parts return dicts of numbers; `MetricsLog` writes them to every sink.

metrics.jsonl holds one line per step and source: {"step": 3, "source": "train", "train/loss": ...}. On resume, lines of
steps that will run again are dropped, so that a step never stands there twice.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from vime.errors import ResourceError

__all__ = ["MetricsLog", "read_metrics"]


class MetricsLog:
    """Metrics to `<folder>/metrics.jsonl` and, when asked, to TensorBoard. Samples to `<folder>/samples.jsonl`."""

    def __init__(self, folder: Path, *, first_step: int, tensorboard_dir: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self.samples_path = folder / "samples.jsonl"
        for path in (self.path, self.samples_path):
            _drop_steps_from(path, first_step)
        self._metrics = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        self._samples = self.samples_path.open("a", encoding="utf-8", errors="backslashreplace")
        self._events: EventFileWriter | None = None
        if tensorboard_dir is not None:
            tensorboard_dir.mkdir(parents=True, exist_ok=True)
            self._events = EventFileWriter(str(tensorboard_dir))
            start = SessionLog(status=SessionLog.START)  # TensorBoard drops earlier events of steps that run again
            self._events.add_event(Event(wall_time=time.time(), step=first_step, session_log=start))

    def log(self, step: int, source: str, metrics: Mapping[str, float]) -> None:
        """Write the numbers of one step. Values that are no finite number are written as null, never dropped."""
        numbers = {name: float(value) for name, value in sorted(metrics.items())}
        clean = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        _write_line(self._metrics, {"step": step, "source": source, **clean})
        if self._events is not None:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
            self._events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def log_samples(self, step: int, source: str, samples: list[dict[str, Any]]) -> None:
        """Write readable samples of one step."""
        for sample in samples:
            _write_line(self._samples, {"step": step, "source": source, **sample})

    def close(self) -> None:
        """Flush and close every sink."""
        for sink in (self._metrics, self._samples, self._events):
            if sink is not None:
                with contextlib.suppress(OSError):  # what could not be written was reported when it was written
                    sink.close()


def _write_line(file: Any, record: dict[str, Any]) -> None:
    try:
        file.write(json.dumps(record, ensure_ascii=False, default=_plain) + "\n")
        file.flush()
    except OSError as error:
        raise _not_written(file.name, error) from error


def _not_written(path: str | Path, error: OSError) -> ResourceError:
    return ResourceError(f"cannot write {path}: {error.strerror}. Free space on that disk and run the same command again.")


def _plain(value: Any) -> Any:
    """What JSON does not know: numbers of numpy and torch as numbers, all else as text."""
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):
        return str(value)


def _drop_steps_from(path: Path, first_step: int) -> None:
    """Remove lines of steps >= first_step, and a last line that a kill cut short. A run that begins anew keeps nothing."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").split("\n") if first_step > 0 else []
    kept = [line for line in lines if (step := _step_of(line)) is not None and step < first_step]
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _not_written(path, error) from error


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def read_metrics(path: Path) -> dict[str, list[tuple[int, float]]]:
    """metrics.jsonl as {name: [(step, value), ...]}, in file order; nulls left out."""
    out: dict[str, list[tuple[int, float]]] = {}
    for line in filter(None, path.read_text(encoding="utf-8").split("\n")):
        record = json.loads(line)
        step = record.pop("step")
        record.pop("source", None)
        for name, value in record.items():
            if value is not None:
                out.setdefault(name, []).append((step, value))
    return out
