"""What a rollout may ask of the engines besides generating: to return what they have, and which weights they hold."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["EngineAccess"]


class EngineAccess:
    """Handed to rollouts as `args.engine_access`; one object for the whole run."""

    def __init__(self, abort: Callable[[], object] | None = None) -> None:
        self._abort = abort
        self.version: int | None = None  # of the last weights that were sent; None before the first

    def abort(self) -> None:
        """Make every request in flight return what it has (finish_reason "abort"). Blocks; PeerError when an engine does not answer."""
        if self._abort is not None:
            self._abort()
