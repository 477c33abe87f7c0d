"""Groups generated all the time, a bounded number of them ahead of the trainer.

    data source ─▶ begun ─▶ finished ─▶ filter ─▶ ready ─▶ batch of a step: the oldest first

With engines at weight version v and step s to be taken next, at most rollout_batch_size x (v + bound + 1 - s) groups are begun or
ready: each can be trained before it is more than `bound` versions behind. Consumes: prompts. Waits for: room. Unblocked by: a
batch that is taken, new weights, a group that fails or is filtered out.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from typing import Any

from vime.errors import DeadlineError
from vime.rollout.base_types import Group, RolloutFnTrainOutput
from vime.rollout.buffer import oldest_version
from vime.rollout.collect import GroupWork, Task, Work, cancel_all, group_index
from vime.rollout.generate_state import GenerateState
from vime.rollout.ledger import State
from vime.rollout.tracking import end_group
from vime.utils.types import Sample

__all__ = ["ContinuousCollector", "renewed"]


class ContinuousCollector(GroupWork):
    """Lives as long as the run; all methods belong to one event loop."""

    def __init__(self, state: GenerateState, data_source: Any, *, first_step: int, num_steps: int, bound: int, version: int) -> None:
        """`bound`: steps that a group may be trained after the weights it began under; `version`: of the engines' weights now."""
        super().__init__(state, data_source)
        self.next_step, self.num_steps, self.bound, self.version = first_step, num_steps, bound, version
        self.open = False  # whether groups are begun
        self.ready: list[Work] = []
        self.stale: Counter[str] = Counter()
        self.failure: Exception | None = None
        self._changed = asyncio.Event()
        self._last_batch = time.monotonic()
        self._idle_seconds = 0.0
        self._idle_since: float | None = time.monotonic()

    def resume(self, version: int) -> None:
        """The engines hold `version`; begin groups while there is room."""
        self.version, self.open = version, True
        self._fill()

    def pause(self) -> None:
        """Begin no more groups; those that run go on."""
        self.open = False

    async def drain(self) -> None:
        """Begin no more groups and wait for those that run. DeadlineError after --rollout-deadline."""
        self.pause()
        await self._until(lambda: not self.pending, phase="finish what is in flight", progress=lambda: f"{len(self.pending)} groups left")

    async def take_batch(self, step: int) -> RolloutFnTrainOutput:
        """The batch of `step`: the groups with the oldest weights, ordered by group_index, and its metrics.

        Groups that are over the bound are stale: issued again or dropped, as --stale-groups says; those that the data source gives
        with older tokens, too. With "wait" the batch waits for groups that would be over the bound in the next step, so that none
        becomes stale here, and one that comes stale is issued again. With deterministic inference it is the
        groups with the lowest index, whichever were finished first.

        Raises:
            DeadlineError: --rollout-deadline ran out; says how many groups were finished.
            Whatever the groups raised: see `BatchCollector.collect`.
        """
        self.next_step = step
        self._expire(step - self.bound)
        self._fill()
        chosen: list[Work] = []

        def enough() -> bool:
            chosen[:] = self._choose(step)
            return bool(chosen)

        await self._until(enough, phase="generate", progress=lambda: f"{len(self.ready)} of {self.target} groups")
        self.ready = [work for work in self.ready if work not in chosen]
        self.next_step = step + 1
        self._fill()
        now = time.monotonic()
        output = self.output([work.group for work in chosen], rollout_id=step, seconds=now - self._last_batch)
        self._last_batch = now
        output.metrics |= self._state_metrics(now)
        return output

    async def close(self) -> None:
        """Cancel what runs."""
        self.open = False
        tasks, self.pending = list(self.pending), {}
        await cancel_all(tasks)

    def _fill(self) -> None:
        """Begin groups while there is room."""
        try:
            while self.open and self.failure is None and (room := self._room()) > 0:
                for drawn in self.draw(room):
                    if (group := self._within_bound(drawn)) is None:
                        continue
                    task = self.submit(group, keep=True)
                    oldest = oldest_version(group)
                    self.pending[task].version = self.version if oldest is None else oldest
                    task.add_done_callback(self._done)
        except Exception as error:  # noqa: BLE001 - whatever it is ends the run: `_until` and the producer raise it
            self._fail(error)
        self._clock()

    def _within_bound(self, group: Group) -> Group | None:
        """What is begun of a group of the data source: one that comes back with tokens over the bound is generated anew, or dropped."""
        version, oldest = oldest_version(group), self.next_step - self.bound
        if version is None or version >= oldest:
            return group
        if self.args.stale_groups == "drop":
            self.stale["dropped"] += 1
            end_group(self.source, group, State.STALE, f"came back with tokens of weights {version}, before {oldest}")
            return None
        self.stale["reissued"] += 1
        return renewed(group)

    def _room(self) -> int:
        ahead = min(self.version + self.bound + 1, self.num_steps) - self.next_step
        return self.target * ahead - len(self.pending) - len(self.ready)

    def _done(self, task: Task) -> None:
        work = self.pending.get(task)
        if work is None:
            return  # given up
        try:
            group = self.take(task)
        except Exception as error:  # noqa: BLE001 - as in `_fill`
            self._fail(error)
            return
        if group is not None:
            self.ready.append(Work(group, work.before, work.version))
        self._fill()
        self._changed.set()

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self._changed.set()

    def _choose(self, step: int) -> list[Work]:
        """The batch, or nothing while it is not complete."""
        if self.args.vllm_enable_deterministic_inference:
            first = sorted([*self.ready, *self.pending.values()], key=lambda work: group_index(work.group))[: self.target]
            complete = len(first) == self.target and all(work in self.ready for work in first)
            return first if complete else []
        overdue = any(work.version <= step - self.bound for work in self.pending.values())
        if len(self.ready) < self.target or (overdue and self.args.stale_groups == "wait"):
            return []
        return sorted(self.ready, key=lambda work: (work.version, group_index(work.group)))[: self.target]

    def _expire(self, oldest: int) -> None:
        """Take out what began under weights before `oldest`."""
        tasks = [task for task, work in self.pending.items() if work.version < oldest]
        stale = [work for work in self.ready if work.version < oldest] + [self.pending.pop(task) for task in tasks]
        self.ready = [work for work in self.ready if work.version >= oldest]
        for task in tasks:
            task.cancel()
        kind = "dropped" if self.args.stale_groups == "drop" else "reissued"
        self.stale[kind] += len(stale)
        if kind == "dropped":
            for work in stale:
                end_group(self.source, work.group, State.STALE, f"began under weights {work.version}, before {oldest}")
        else:
            anew = [renewed(work.before if work.before is not None else work.group) for work in stale]
            self.give_back(anew, reason=f"stale: began under weights before {oldest}, to be generated anew")

    async def _until(self, condition: Any, *, phase: str, progress: Any) -> None:
        begun = time.monotonic()
        while True:
            if self.failure is not None:
                raise self.failure
            if condition():
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(max(0.0, self.args.rollout_deadline - (time.monotonic() - begun))):
                    await self._changed.wait()
            except TimeoutError:
                raise DeadlineError(
                    peer=f"the batch of step {self.next_step}",
                    phase=phase,
                    seconds=self.args.rollout_deadline,
                    progress=progress(),
                    cure="Look for a slow engine, tool or judge; or raise --rollout-deadline.",
                ) from None

    def _clock(self) -> None:
        """Count the time in which nothing is in flight."""
        now = time.monotonic()
        if self._idle_since is not None:
            self._idle_seconds += now - self._idle_since
        self._idle_since = None if self.pending else now

    def _state_metrics(self, now: float) -> dict[str, float]:
        self._clock()
        counts = {
            "rollout/queue_depth": float(len(self.ready)),
            "rollout/groups_in_flight": float(len(self.pending)),
            "rollout/stale/reissued": float(self.stale["reissued"]),
            "rollout/stale/dropped": float(self.stale["dropped"]),
            "perf/engine_idle_time": self._idle_seconds,
        }
        self._idle_seconds, self.stale = 0.0, Counter()
        return counts


def renewed(group: Group) -> Group:
    """The group as it was before anything was generated for it; ids, prompt and label stay."""
    out: Group = []
    for member in group:
        sample = copy.copy(member[0] if isinstance(member, list) else member)
        length, fresh = sample.response_length, Sample()
        for name in (
            "response", "response_length", "reward", "loss_mask", "weight_versions", "rollout_log_probs", "teacher_log_probs",
            "rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts", "remove_sample", "status", "session_id",
            "non_generation_time",
        ):  # fmt: skip
            setattr(sample, name, getattr(fresh, name))
        sample.tokens = sample.tokens[: len(sample.tokens) - length]
        sample.metadata = {k: v for k, v in sample.metadata.items() if k not in ("failure", "start_rollout_id")}
        out.append(sample)
    return out
