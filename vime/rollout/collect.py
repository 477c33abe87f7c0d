"""Filling one batch: groups are submitted, finished, filtered, replaced, until there are enough.

data source ─get_samples▶ submitted ─▶ finished ─▶ filter ─▶ accepted ─▶ batch (ordered by group_index)
     ▲                        │            │ failed: counted, another prompt instead
     └────── give back ───────┴────────────┘ surplus: to the buffer (finished as it is, unfinished afresh)
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections import Counter
from typing import Any

from vime.errors import DeadlineError, GenerationError
from vime.hooks import hook_errors, load_hook, user_errors
from vime.rollout.base_types import Group, RolloutFnTrainOutput
from vime.rollout.filter_hub.base_types import DynamicFilterOutput
from vime.rollout.generate_state import GenerateState
from vime.rollout.generation import generate_and_rm_group, segments, usable
from vime.rollout.ledger import State
from vime.rollout.metrics import rollout_metrics
from vime.rollout.tracking import end_group

__all__ = ["MAX_FAILED_IN_A_ROW", "BatchCollector"]

MAX_FAILED_IN_A_ROW = 16  # groups; then something is broken that other prompts do not mend
CANCEL_SECONDS = 10.0  # how long cancelled work may take to end

Task = asyncio.Task[Group]


class BatchCollector:
    """Collects one rollout step's groups."""

    def __init__(self, state: GenerateState, rollout_id: int, data_source: Any) -> None:
        self.state, self.args, self.rollout_id, self.source = state, state.args, rollout_id, data_source
        self.target: int = self.args.rollout_batch_size
        self.accepted: list[Group] = []
        self.pending: dict[Task, Group | None] = {}  # the group as it was before, where it may have to be given back
        self.at_work: dict[Task, Group] = {}  # the group itself
        self.drops: Counter[str] = Counter()
        self.failed_groups = 0
        self.failed_in_a_row = 0
        path = self.args.dynamic_sampling_filter_path
        self.filter = load_hook(path, "dynamic_sampling_filter_path") if path else None

    async def collect(self) -> RolloutFnTrainOutput:
        """The batch: `rollout_batch_size` groups ordered by group_index, and its metrics.

        Raises:
            DeadlineError: --rollout-deadline ran out; says how many groups were finished.
            GenerationError: MAX_FAILED_IN_A_ROW groups in a row could not be had; names the last cause.
            HookError, RewardError, DataError, ConfigError: from the parts.
        """
        begun = time.monotonic()
        try:
            while len(self.accepted) < self.target:
                self._fill()
                for task in await self._wait(begun):
                    self._take(task)
            groups = self._give_back_surplus()
        finally:
            await cancel_all(list(self.pending))
        self._mark_filtered(groups)
        metrics = rollout_metrics(self.args, groups, seconds=time.monotonic() - begun) | self._counts()
        return RolloutFnTrainOutput(samples=groups, metrics=metrics)

    def _fill(self) -> None:
        """Submit prompts while accepted and running groups are fewer than needed."""
        wave = self.args.over_sampling_batch_size
        while (missing := self.target - len(self.accepted) - len(self.pending)) > 0:
            with self._source_errors():
                groups = self.source.get_samples(wave if wave is not None else missing)
            if not groups:
                raise GenerationError(f"the data source gave no prompt group when {missing} were asked for; get_samples must return some.")
            for group in groups:
                before = copy.deepcopy(group) if wave is not None else None
                work = generate_and_rm_group(self.args, group, dict(self.state.sampling_params))
                task = asyncio.ensure_future(work)
                self.pending[task], self.at_work[task] = before, group

    async def _wait(self, begun: float) -> list[Task]:
        """Tasks that are done, by group. Deterministic runs wait for all, so that speed decides nothing."""
        when = asyncio.ALL_COMPLETED if self.args.vllm_enable_deterministic_inference else asyncio.FIRST_COMPLETED
        left = self.args.rollout_deadline - (time.monotonic() - begun)
        done, _ = await asyncio.wait(self.pending, timeout=max(left, 0.0), return_when=when)
        if not done or (when == asyncio.ALL_COMPLETED and len(done) < len(self.pending)):
            if when == asyncio.ALL_COMPLETED:
                for task in done:
                    self._take(task)
            raise DeadlineError(
                peer=f"rollout step {self.rollout_id}",
                phase="generate",
                seconds=self.args.rollout_deadline,
                progress=f"{len(self.accepted)} of {self.target} groups",
                cure="Look for a slow engine, tool or judge; or raise --rollout-deadline.",
            )
        return [task for task in self.pending if task in done]

    def _take(self, task: Task) -> None:
        """One finished group: accept, drop, or count its failure."""
        self.pending.pop(task)
        as_it_is = self.at_work.pop(task)
        try:
            group = task.result()
        except GenerationError as error:
            end_group(self.source, as_it_is, State.FAILED, str(error))
            self.failed_groups += 1
            self.failed_in_a_row += 1
            if self.failed_in_a_row >= MAX_FAILED_IN_A_ROW:
                raise GenerationError(
                    f"rollout step {self.rollout_id}: {self.failed_in_a_row} groups in a row could not be had, so the run ends. "
                    f"The last cause: {error}"
                ) from error
            return
        self.failed_in_a_row = 0
        verdict = self._judge(group)
        if verdict.keep:
            self.accepted.append(group)
        else:
            self.drops[verdict.reason or "unnamed"] += 1
            end_group(self.source, group, State.FILTERED, f"--dynamic-sampling-filter-path: {verdict.reason or 'unnamed'}")

    def _judge(self, group: Group) -> DynamicFilterOutput:
        if self.filter is None:
            return DynamicFilterOutput(keep=True)
        path = self.args.dynamic_sampling_filter_path
        with hook_errors("--dynamic-sampling-filter-path", path, self.filter):
            verdict = self.filter(self.args, usable(group))
        return verdict if isinstance(verdict, DynamicFilterOutput) else DynamicFilterOutput(keep=bool(verdict))

    def _give_back_surplus(self) -> list[Group]:
        """The batch; what is beyond it goes back: finished groups as they are, unfinished ones as they were."""
        self.accepted.sort(key=_group_index)
        batch, surplus = self.accepted[: self.target], self.accepted[self.target :]
        surplus += [group for group in self.pending.values() if group is not None]
        if surplus:
            with self._source_errors():
                self.source.add_samples(surplus)
        return batch

    def _source_errors(self) -> contextlib.AbstractContextManager[None]:
        return user_errors("--data-source-path", self.args.data_source_path, type(self.source))

    def _mark_filtered(self, groups: list[Group]) -> None:
        path = self.args.rollout_sample_filter_path
        if path:
            function = load_hook(path, "rollout_sample_filter_path")
            with hook_errors("--rollout-sample-filter-path", path, function):
                function(self.args, groups)

    def _counts(self) -> dict[str, float]:
        dropped = sum(self.drops.values())
        counts = {"rollout/failed_groups": float(self.failed_groups)}
        if self.filter is not None:
            counts["rollout/dynamic_filter/dropped_groups"] = float(dropped)
            counts["rollout/dynamic_filter/dropped_ratio"] = dropped / (dropped + len(self.accepted))
        return counts | {f"rollout/dynamic_filter/drop_{reason}": float(count) for reason, count in self.drops.items()}


async def cancel_all(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel and await; work that does not end within CANCEL_SECONDS is left to the loop's end."""
    for task in tasks:
        task.cancel()
    if tasks:
        done, _ = await asyncio.wait(tasks, timeout=CANCEL_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()  # taken note of: the first error is already on its way up


def _group_index(group: Group) -> int:
    index = next(segments(group)).group_index
    return -1 if index is None else index
