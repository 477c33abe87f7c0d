"""Waiting with eyes open: every wait has a deadline, and ends at once when any actor of the run dies.

Each actor keeps one call open that only returns when the run ends (`watch`). Ray completes it with an error the moment the
actor's process dies, or the actor itself raises there when its child (engine, router) does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from vime.errors import DeadlineError, PeerError, TrainerError, VimeError

__all__ = ["Supervisor", "tail"]

POLL_SECONDS = 0.5


class Supervisor:
    """Knows every actor of the run by name."""

    def __init__(self) -> None:
        self._watches: dict[Any, str] = {}
        self._logs: dict[str, Path] = {}
        self._on_end: dict[str, Callable[[VimeError], None]] = {}
        self._on_look: list[Callable[[], None]] = []

    def watch(self, name: str, ref: Any, log: Path | None = None) -> None:
        """From now on, an end of `ref` while anything is waited for ends that wait with an error naming `name`."""
        self._watches[ref] = name
        if log is not None:
            self._logs[name] = log

    def unwatch(self, name: str) -> None:
        """Nothing is made of an end of `name` any more."""
        self._watches = {ref: watched for ref, watched in self._watches.items() if watched != name}

    def survive(self, name: str, call: Callable[[VimeError], None]) -> None:
        """An end of `name` ends no wait: `call` gets the error instead, and `name` is no longer watched."""
        self._on_end[name] = call

    def on_look(self, call: Callable[[], None]) -> None:
        """Do `call`, which must not take long, at each look around while something is waited for (every POLL_SECONDS at least)."""
        self._on_look.append(call)

    def get(
        self, refs: Sequence[Any], *, names: Sequence[str], phase: str, deadline: float, progress: Callable[[], str] | None = None
    ) -> list[Any]:
        """The values of `refs` in order. names[i] is the peer that refs[i] waits for."""
        name_of = dict(zip(refs, names, strict=True))
        pending = list(refs)
        end = time.monotonic() + deadline
        while pending:
            if time.monotonic() > end:
                waiting = ", ".join(sorted({name_of[ref] for ref in pending}))
                raise DeadlineError(
                    peer=waiting,
                    phase=phase,
                    seconds=deadline,
                    progress=progress() if progress else f"{len(refs) - len(pending)} of {len(refs)} answered",
                    cure=self._log_hint(name_of[pending[0]]),
                )
            self._look(pending, phase)
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
            for ref in ready:
                self._value(ref, name_of[ref], phase)
                pending.remove(ref)
        return [self._value(ref, name_of[ref], phase) for ref in refs]

    def wait_for(
        self,
        condition: Callable[[], bool],
        *,
        peer: str,
        phase: str,
        deadline: float,
        progress: Callable[[], str],
        cure: str = "",
        refs: Sequence[Any] = (),
    ) -> None:
        """Return once `condition()` is true, which what is done at each look makes it, or that one of `refs` is there."""
        end = time.monotonic() + deadline
        while not condition():
            if time.monotonic() > end:
                raise DeadlineError(peer=peer, phase=phase, seconds=deadline, progress=progress(), cure=cure)
            self._look(refs, phase)

    def _look(self, pending: Sequence[Any], phase: str) -> None:
        """Wait until something ends, POLL_SECONDS at most; deaths first: a dead child explains a failed call."""
        watched = list(self._watches)
        ready, _ = ray.wait([*pending, *watched], num_returns=1, timeout=POLL_SECONDS)
        for ref in ready:
            name = self._watches.get(ref)
            if name in self._on_end:
                error = self._death(name, ref, phase)
                self.unwatch(name)
                self._on_end[name](error)
            elif name is not None:
                raise self._death(name, ref, phase) from None
        for call in self._on_look:
            call()

    def _value(self, ref: Any, name: str, phase: str) -> Any:
        """The value of a finished call, its failure turned into one of our errors."""
        try:
            return ray.get(ref, timeout=60.0)
        except RayActorError as error:
            raise self._died(name, phase, error) from None
        except RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, VimeError):
                for watch, watched in self._watches.items():  # prefer the word of a peer that died over its consequence
                    if watched != name and watched not in self._on_end and ray.wait([watch], timeout=0)[0]:
                        raise self._death(watched, watch, phase) from None
                raise cause from None
            if isinstance(cause, OSError):
                raise cause from None
            lines = str(error).strip().splitlines()
            raise TrainerError(f"{name} failed in '{phase}': {lines[-1]}\n" + "\n".join(lines[-12:]) + self._log_hint(name)) from None
        except GetTimeoutError:
            raise DeadlineError(peer=name, phase=phase, seconds=60.0, progress="the call finished, its value did not arrive") from None
        except RayError as error:
            raise PeerError(f"{name} failed in '{phase}': {error}") from None

    def _death(self, name: str, ref: Any, phase: str) -> VimeError:
        """Why `name`, whose `ref` has ended, is no more."""
        try:
            ray.get(ref, timeout=5.0)
        except RayTaskError as error:
            cause = getattr(error, "cause", None)
            return cause if isinstance(cause, VimeError) else PeerError(f"{name} failed during '{phase}': {error}")
        except RayError as error:
            return self._died(name, phase, error)
        return PeerError(f"{name} ended by itself during '{phase}', which it must not.{self._log_hint(name)}")

    def _died(self, name: str, phase: str, error: Exception) -> PeerError:
        reason = next((line.strip() for line in str(error).splitlines() if "exit" in line.lower() or "killed" in line.lower()), "")
        log = self._logs.get(name)
        last = tail(log, 15) if log else ""
        return PeerError(
            f"{name} died during '{phase}'. {reason}"
            + (f"\nThe last lines of {log}:\n{last}" if last else "")
            + "\nThe run has ended; the same command resumes from the last commit (when --save is given)."
        )

    def _log_hint(self, name: str) -> str:
        log = self._logs.get(name)
        return f"\nIts log: {log}" if log else ""


def tail(path: Path, lines: int) -> str:
    """The last lines of a text file; "" when there is none."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
