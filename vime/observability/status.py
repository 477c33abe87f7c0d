"""One live status: a line that rewrites itself in a terminal, one line per step in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO

__all__ = ["Status", "duration"]


class Status:
    """Step, reward, phase seconds, tokens/s and ETA. `phase` shows what runs now; `step` closes a step."""

    def __init__(self, total_steps: int, *, first_step: int = 0, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._total, self._first = total_steps, first_step
        self._begun = time.monotonic()
        self._width = 0

    def phase(self, step: int | None, text: str) -> None:
        """What is being done now. Only a terminal shows it: a log has a line per step."""
        if self._live:
            head = "" if step is None else f"step {step + 1}/{self._total}  "
            self._rewrite(f"{head}{text} …")

    def say(self, text: str) -> None:
        """A line that stays."""
        self._clear()
        print(text, file=self._stream, flush=True)

    def step(self, step: int, metrics: Mapping[str, float], phases: Mapping[str, float]) -> None:
        """The line of a finished step."""
        done = step + 1 - self._first
        left = (self._total - step - 1) * (time.monotonic() - self._begun) / max(done, 1)
        parts = [f"step {step + 1}/{self._total}"]
        for name, label, form in _SHOWN:
            if name in metrics:
                parts.append(f"{label} {metrics[name]:{form}}")
        parts.append(" ".join(f"{name} {seconds:.1f}s" for name, seconds in phases.items()))
        parts.append(f"ETA {duration(left)}")
        self.say("  ".join(parts))

    def _rewrite(self, text: str) -> None:
        self._stream.write("\r" + text.ljust(self._width))
        self._stream.flush()
        self._width = len(text)

    def _clear(self) -> None:
        if self._live and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._width = 0


_SHOWN = (
    ("rollout/raw_reward", "reward", ".3f"),
    ("train/loss", "loss", "z.4f"),
    ("train/grad_norm", "grad", ".2f"),
    ("train/train_rollout_logprob_abs_diff", "mismatch", ".1e"),
    ("perf/tokens_per_second", "tok/s", ".0f"),
)


def duration(seconds: float) -> str:
    """Seconds as 1h02m, 3m20s or 12s."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"
