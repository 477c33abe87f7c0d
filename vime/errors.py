"""The one exception tree. Every message names what was wrong, what was expected and what to do.

    VimeError
    ├── ConfigError            a flag or a combination of flags; raised before Ray starts
    ├── DataError              a prompt file, a row, a label
    ├── CheckpointError        a model folder or a saved state
    ├── HookError              a user's function: wrong signature, or it raised
    ├── RewardError            a reward that is missing or not a finite number
    ├── ResourceError          cores, memory, disk, ports
    ├── PeerError              another process failed us (names peer, phase, last progress)
    │   ├── EngineError        a vLLM engine or the router
    │   ├── TrainerError       a trainer process
    │   └── DeadlineError      a wait ran out
    ├── WeightSyncError        the engines do not hold the trainer's weights
    └── GenerationError        a sample that cannot be had; counted, never turned into a reward

All errors pickle: they cross process borders.
"""

from __future__ import annotations


class VimeError(Exception):
    """Base of all errors whose message is meant for the user; the command line prints it without a traceback."""

    exit_code = 1


class ConfigError(VimeError):
    """A flag, or a combination of flags, is wrong. `problems` holds all that were found."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = list(problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return "\n".join(f"{number}. {text}" for number, text in enumerate(self.problems, 1))


class DataError(VimeError):
    """A prompt file, a row or a label is missing or malformed."""


class CheckpointError(VimeError):
    """A model folder or a saved state is missing, torn or of a kind that is not known."""


class HookError(VimeError):
    """A user's function has the wrong signature, cannot be loaded, or raised."""


class RewardError(VimeError):
    """A reward is missing or not a finite number."""


class ResourceError(VimeError):
    """Cores, memory, disk space, shared memory or a port are not to be had."""


class PeerError(VimeError):
    """Another process of the run failed or did not answer."""


class EngineError(PeerError):
    """A vLLM engine or the router failed."""


class TrainerError(PeerError):
    """A trainer process failed."""


class DeadlineError(PeerError):
    """A wait ran out. The message names the peer, the phase and the last progress seen."""

    def __init__(self, *, peer: str, phase: str, seconds: float, progress: str = "none", cure: str = "") -> None:
        self.peer, self.phase, self.seconds, self.progress, self.cure = peer, phase, seconds, progress, cure
        super().__init__(f"{peer} did not finish '{phase}' within {seconds:g} s (last progress: {progress}). {cure}".rstrip())

    def __reduce__(self) -> tuple[object, ...]:
        fields = {name: getattr(self, name) for name in ("peer", "phase", "seconds", "progress", "cure")}
        return (_deadline_error, (fields,))


def _deadline_error(fields: dict[str, object]) -> DeadlineError:
    return DeadlineError(**fields)  # type: ignore[arg-type]


class WeightSyncError(VimeError):
    """The engines do not hold the weights that the trainer sent."""


class GenerationError(VimeError):
    """A sample or a group cannot be had (engine, tool, sandbox or judge failed). Counted; never a reward of 0."""
