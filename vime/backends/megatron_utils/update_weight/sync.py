"""`WeightUpdater`: the trainer's weights to the engines, as one transaction with a version and a proof.

    pause (keep) ─▶ reset prefix cache ─▶ start ─▶ buckets ─▶ compare digests ─▶ finish(version) ─▶ resume ─▶ proof

An engine samples under version v until the pause and under v + 1 after the resume. When anything fails in between, no engine
is resumed: a half-loaded engine generates nothing. With `step_seconds` an engine that fails, or takes longer over a step, is left
behind as it is, and the sync goes on with the others. Runs on the trainer's rank 0; the other ranks only iterate the buckets.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from vime.backends.megatron_utils.update_weight.carriers import Bucket, Carrier, carrier_of
from vime.backends.megatron_utils.update_weight.compare import Sent, describe, differences
from vime.backends.weight_transfer.control import EngineControl, EngineEndpoint
from vime.backends.weight_transfer.segment import remove_stale_segments
from vime.config.sections import WeightUpdateConfig
from vime.errors import DeadlineError, EngineError, PeerError, WeightSyncError
from vime.types import WeightSyncReport

__all__ = ["WeightUpdater"]

_TOLERANCE = {torch.float32: 1e-4}  # largest |log-prob of trainer - engine| on the probe, by the weights' dtype
_LOW_PRECISION_TOLERANCE = 0.1
_ABANDON_SECONDS = 5.0  # per call to an engine whose update has failed


_RESOLUTION = 2e-5  # a step that moves the probe's log-probs by less than this, or by less than
_NOISE_FACTOR = 5.0  # so many times the differences seen in good syncs, is not told from the rounding of float32


class WeightUpdater:
    """Sends weights to engines on this host."""

    model: str | None = None  # whom the proof asks; None: the model itself

    def __init__(self, config: WeightUpdateConfig, *, run_id: str, step_seconds: float | None = None, transport: str = "shm") -> None:
        """`run_id` is part of the shared-memory segments' names. Segments that dead trainers left are removed here.

        `transport`: a name that `carriers` has.

        `step_seconds`: how long an engine may take over one step before it is left behind; None: any failure ends the sync.
        """
        self._engines: list[EngineControl] = []  # those that are still in the present sync
        self._lost: dict[str, str] = {}
        self._config, self._run_id, self._step_seconds, self._transport = config, run_id, step_seconds, transport
        self._deadline = math.inf
        self._sent: dict[str, Sent] = {}
        self._bytes = 0
        self._phases: dict[str, float] = {}
        self._previous: list[float] | None = None  # the probe's log-probs at the sync before
        self._noise = 0.0  # the largest difference of all proofs that held
        remove_stale_segments()

    def update(
        self,
        engines: Sequence[EngineEndpoint],
        version: int,
        buckets: Iterator[Bucket],
        probe_tokens: list[int],
        trainer_log_probs: Callable[[list[int]], list[float]],
    ) -> WeightSyncReport:
        """Make every one of `engines` hold these weights as `version`, and prove it.

        `buckets` yields (Hugging Face name, full tensor) pairs; `trainer_log_probs(tokens)` gives the trainer's natural
        log-probabilities of tokens[1:] under the same weights.

        Raises WeightSyncError naming the tensors or the layer, ResourceError without room in shared memory, DeadlineError
        and EngineError naming the engine. After any of them the engines stay paused until a whole update succeeds.
        """
        if not engines:
            raise ValueError("a weight update needs at least one engine")
        if len(probe_tokens) < 2:
            raise ValueError("the probe needs at least two tokens")
        expected = trainer_log_probs(probe_tokens)
        self._engines, self._lost = [EngineControl.of(endpoint) for endpoint in engines], {}
        self._sent, self._bytes, self._phases = {}, 0, {}
        begun = time.monotonic()
        self._deadline = begun + self._config.update_weight_deadline
        with ThreadPoolExecutor(max_workers=len(self._engines)) as pool:
            try:
                worst = self._transaction(pool, version, buckets, probe_tokens, expected)
            except BaseException as error:
                self._abandon(pool)
                raise self._explained(error, version) from error
        return WeightSyncReport(
            version=version,
            num_bytes=self._bytes * len(self._engines),
            seconds=time.monotonic() - begun,
            num_tensors=len(self._sent),
            phases=dict(self._phases),
            proof_max_abs_diff=worst,
            lost=dict(self._lost),
        )

    def _transaction(
        self, pool: ThreadPoolExecutor, version: int, buckets: Iterator[Bucket], probe: list[int], expected: list[float]
    ) -> float:
        with self._phase("pause"):
            self._all(pool, lambda engine: engine.pause("keep", self._left()))
            self._all(pool, lambda engine: engine.reset_prefix_cache(self._left()))
        with self._phase("start"):
            self._all(pool, self._start)
        with self._phase("transfer"):
            self._transfer(pool, buckets)
        with self._phase("finish"):
            self._compare(pool)
            self._all(pool, lambda engine: engine.finish_weight_update(str(version), self._left()))
        with self._phase("resume"):
            self._all(pool, lambda engine: engine.resume(self._left()))
        with self._phase("proof"):
            return self._prove(pool, version, probe, expected)

    def _start(self, engine: EngineControl) -> None:
        """Open the update; an older one that a dead trainer left open is closed first."""
        try:
            engine.start_weight_update(self._left())
        except EngineError as error:
            if "already active" not in str(error):
                raise
            engine.finish_weight_update(None, self._left())
            engine.start_weight_update(self._left())

    def _transfer(self, pool: ThreadPoolExecutor, buckets: Iterator[Bucket]) -> None:
        with contextlib.closing(self._carrier()) as carrier:
            for bucket in buckets:
                if not bucket or not self._engines:  # with no engine left: the other ranks wait for us to take every bucket
                    continue
                carried = carrier.put(bucket)
                for name in carried.sent.keys() & self._sent.keys():
                    raise WeightSyncError(f"The trainer sent the tensor '{name}' twice in one update.")
                self._sent |= carried.sent
                self._bytes += carried.num_bytes
                self._all(pool, lambda engine, info=carried.info: engine.update_weights(info, self._left()))  # type: ignore[misc]
                carrier.delivered()

    def _carrier(self) -> Carrier:
        return carrier_of(self._transport, self._run_id)

    def _compare(self, pool: ThreadPoolExecutor) -> None:
        """Every worker of every engine received exactly what was sent, and every parameter of its model was loaded."""
        if not self._sent and self._engines:
            raise WeightSyncError("The trainer sent no weights at all.")
        problems = []
        answers = self._all(pool, lambda engine: engine.received_weights(self._left()))
        for engine, workers in zip(self._engines, answers, strict=True):
            for worker in workers:
                problems += [f"{engine.name}: {text}" for text in describe(differences(self._sent, worker["tensors"]))]
                if worker["unloaded"]:
                    names = ", ".join(worker["unloaded"][:10])
                    problems.append(f"{engine.name}: no tensor was loaded into {len(worker['unloaded'])} parameters of its model: {names}")
        if problems:
            raise WeightSyncError("The engines did not receive the weights that were sent. " + "; ".join(dict.fromkeys(problems)))

    def _prove(self, pool: ThreadPoolExecutor, version: int, probe: list[int], expected: list[float]) -> float:
        """Compare log-probabilities of the probe, engine by engine; returns the largest difference."""
        worst = 0.0
        answers = self._all(pool, lambda engine: engine.prompt_log_probs(probe, self._left(), self.model))
        for engine, (values, seen) in zip(self._engines, answers, strict=True):
            if seen != str(version):
                raise WeightSyncError(f"{engine.name} says that it samples under weight version '{seen}' after an update to '{version}'.")
            if len(expected) != len(values):
                raise WeightSyncError(
                    f"The trainer gave {len(expected)} log-probs for a probe of {len(probe)} tokens: {len(probe) - 1} are due."
                )
            gaps = [abs(mine - theirs) for mine, theirs in zip(expected, values, strict=True)]
            at = max(range(len(gaps)), key=lambda i: math.inf if math.isnan(gaps[i]) else gaps[i])
            if not gaps[at] <= self._tolerance():
                raise WeightSyncError(
                    f"Every tensor arrived at {engine.name} unchanged, but it computes with other weights: the log-prob of probe token "
                    f"{at + 1} is {values[at]:.6f} there and {expected[at]:.6f} in the trainer (difference {gaps[at]:.2g}, tolerance "
                    f"{self._tolerance():g}). Some layer is stale, for instance an output layer tied to the embedding, or the two sides "
                    "compute the model differently."
                )
            self._refuse_previous(engine.name, values, expected)
            worst = max(worst, gaps[at])
        if not self._engines:
            return math.nan
        self._previous, self._noise = expected, max(self._noise, worst)
        return worst

    def _refuse_previous(self, name: str, values: list[float], expected: list[float]) -> None:
        """A small step can hide inside the tolerance: where it is visible at all, an engine must be nearer to it than to the last one."""
        if self._previous is None:
            return
        least = max(_RESOLUTION, _NOISE_FACTOR * self._noise)
        moved = [(v, new, old) for v, new, old in zip(values, expected, self._previous, strict=True) if abs(new - old) > least]
        if moved and sum(abs(v - new) for v, new, _ in moved) > sum(abs(v - old) for v, _, old in moved):
            most = max(abs(new - old) for _, new, old in moved)
            raise WeightSyncError(
                f"Every tensor arrived at {name} unchanged, but it still computes with the weights of the sync before: on {len(moved)} "
                f"tokens of the probe its log-probs are nearer to those (the step moved them by up to {most:.2g}). "
                "Some layer is stale, for instance an output layer tied to the embedding."
            )

    def _tolerance(self) -> float:
        if self._config.weight_proof_tolerance is not None:
            return self._config.weight_proof_tolerance
        dtypes = {getattr(torch, dtype) for dtype, _, _ in self._sent.values()}
        return max(_TOLERANCE.get(dtype, _LOW_PRECISION_TOLERANCE) for dtype in dtypes)

    def _abandon(self, pool: ThreadPoolExecutor) -> None:
        """After a failure: close the update, let waiting requests return, and leave the engines paused."""

        def end(engine: EngineControl) -> None:
            with contextlib.suppress(PeerError):
                engine.pause("abort", _ABANDON_SECONDS)
            with contextlib.suppress(PeerError):
                engine.finish_weight_update(None, _ABANDON_SECONDS)

        list(pool.map(end, self._engines))

    def _explained(self, error: BaseException, version: int) -> BaseException:
        """The same error, told what the engines' state is."""
        names = ", ".join(engine.name for engine in self._engines)
        progress = f"{len(self._sent)} tensors, {self._bytes / 1e6:.1f} MB handed over"
        if isinstance(error, DeadlineError):
            cure = f"{error.cure} {names} stay paused. If they are only slow, raise --update-weight-deadline."
            phase = f"weight update {version}, {error.phase}"
            return DeadlineError(peer=error.peer, phase=phase, seconds=error.seconds, progress=progress, cure=cure)
        if isinstance(error, WeightSyncError | PeerError):
            state = f"{names} stay paused, without usable weights, until a whole update succeeds."
            return type(error)(f"Weight update {version} failed ({progress}): {error} {state}")
        return error

    def _all(self, pool: ThreadPoolExecutor, call: Callable[[EngineControl], Any]) -> list[Any]:
        """`call` on every engine at once; returns when all have answered, with the answers of `self._engines` in order.

        The first failure is raised; with `step_seconds` the engines that failed leave `self._engines` instead.
        """
        answers, left = [], []
        for engine, future in [(engine, pool.submit(call, engine)) for engine in self._engines]:
            try:
                answers.append(future.result())
                left.append(engine)
            except PeerError as error:
                if self._step_seconds is None:
                    raise
                self._lost[engine.url] = str(error)
        self._engines = left
        return answers

    def _left(self) -> float:
        """Seconds until the deadline of the whole update, or of the present step when that is earlier."""
        left = max(0.001, self._deadline - time.monotonic())
        return left if self._step_seconds is None else min(left, self._step_seconds)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self._phases[name] = time.monotonic() - begun
