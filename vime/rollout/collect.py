"""Filling one batch: groups are submitted, finished, filtered, replaced, until there are enough.

data source ─get_samples▶ submitted ─▶ finished ─▶ filter ─▶ accepted ─▶ batch (ordered by group_index)
     ▲                        │            │ failed: counted, another prompt instead
     └────── give back ───────┴────────────┘ surplus: to the buffer (finished as it is, unfinished afresh; with
                                             --partial-rollout as far as it came)
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from vime.data.prompts import fresh_copy
from vime.errors import DeadlineError, GenerationError
from vime.hooks import hook_errors, load_hook, user_errors
from vime.rollout.base_types import Group, RolloutFnTrainOutput
from vime.rollout.filter_hub.base_types import DynamicFilterOutput
from vime.rollout.generate_state import GenerateState
from vime.rollout.generation import CANCELLED, generate_and_rm_group, segments, usable
from vime.rollout.ledger import State
from vime.rollout.metrics import rollout_metrics
from vime.rollout.tracking import end_group, give_back
from vime.utils.types import Sample

__all__ = ["MAX_FAILED_IN_A_ROW", "BatchCollector", "GroupWork", "cancel_all", "group_index"]

MAX_FAILED_IN_A_ROW = 16  # groups; then something is broken that other prompts do not mend
CANCEL_SECONDS = 10.0  # how long cancelled work may take to end
ABORT_SECONDS = 10.0  # how long unfinished work may take to return what it has
ABORT_AGAIN = 0.25  # seconds after which requests that were on their way are told again

Task = asyncio.Task[Group]


@dataclass(slots=True, eq=False)
class Work:
    """A group at work."""

    group: Group
    before: Group | None  # as it was, where it may have to be given back
    version: int = 0  # of the engines' weights when it began, or of its oldest token


class GroupWork:
    """Groups at work, one task each, and what becomes of those that finish."""

    def __init__(self, state: GenerateState, data_source: Any) -> None:
        self.state, self.args, self.source = state, state.args, data_source
        self.target: int = self.args.rollout_batch_size
        self.pending: dict[Task, Work] = {}
        self.finished: list[Group] = []  # since the last batch, those that were filtered out included
        self.drops: Counter[str] = Counter()
        self.failed_groups = 0
        self.failed_in_a_row = 0
        path = self.args.dynamic_sampling_filter_path
        self.filter = load_hook(path, "dynamic_sampling_filter_path") if path else None

    def draw(self, count: int) -> list[Group]:
        """`count` groups of the data source, one at least."""
        with self.source_errors():
            groups: list[Group] = self.source.get_samples(count)
        if not groups:
            raise GenerationError(f"the data source gave no prompt group when {count} were asked for; get_samples must return some.")
        return groups

    def give_back(self, groups: list[Group], reason: str | None = None) -> None:
        """To the data source's buffer; `reason` for the ledger."""
        if groups:
            with self.source_errors():
                give_back(self.source, groups, reason)

    def submit(self, group: Group, *, keep: bool) -> Task:
        """Begin a group; with `keep` a copy of it as it is now is held until it is finished."""
        work = Work(group, _copied(group) if keep else None)
        task = asyncio.ensure_future(generate_and_rm_group(self.args, group, dict(self.state.sampling_params)))
        self.pending[task] = work
        return task

    def take(self, task: Task) -> Group | None:
        """The group of a finished task, when it was had and is to be kept; its failure or drop is counted.

        Raises:
            GenerationError: MAX_FAILED_IN_A_ROW groups in a row could not be had; names the last cause.
        """
        work = self.pending.pop(task)
        try:
            if task.cancelled():  # not by us: what we cancel is not taken
                raise GenerationError(CANCELLED)
            group = task.result()
        except GenerationError as error:
            end_group(self.source, work.group, State.FAILED, str(error))
            self.failed_groups += 1
            self.failed_in_a_row += 1
            if self.failed_in_a_row >= MAX_FAILED_IN_A_ROW:
                raise GenerationError(
                    f"{self.failed_in_a_row} groups in a row could not be had, so the run ends. The last cause: {error}"
                ) from error
            return None
        if unfinished(group):
            return group
        self.failed_in_a_row = 0
        self.finished.append(group)
        verdict = self._judge(group)
        if verdict.keep:
            return group
        self.drops[verdict.reason or "unnamed"] += 1
        end_group(self.source, group, State.FILTERED, f"--dynamic-sampling-filter-path: {verdict.reason or 'unnamed'}")
        return None

    def _judge(self, group: Group) -> DynamicFilterOutput:
        if self.filter is None:
            return DynamicFilterOutput(keep=True)
        path = self.args.dynamic_sampling_filter_path
        with hook_errors("--dynamic-sampling-filter-path", path, self.filter):
            verdict = self.filter(self.args, usable(group))
        return verdict if isinstance(verdict, DynamicFilterOutput) else DynamicFilterOutput(keep=bool(verdict))

    def output(self, groups: list[Group], *, rollout_id: int, seconds: float) -> RolloutFnTrainOutput:
        """A batch with its metrics, after the hooks that see whole batches. What was counted begins anew."""
        groups.sort(key=group_index)
        self._call_hook(self.args.rollout_sample_filter_path, "rollout_sample_filter_path", groups)
        self._call_hook(
            self.args.rollout_all_samples_process_path,
            "rollout_all_samples_process_path",
            sorted(self.finished, key=group_index),
            self.source,
        )
        current = rollout_id if self.state.engines.version is not None else None
        metrics = rollout_metrics(self.args, groups, seconds=seconds, version=current) | self._counts(len(groups))
        self.finished, self.drops, self.failed_groups = [], Counter(), 0
        return RolloutFnTrainOutput(samples=groups, metrics=metrics)

    def _call_hook(self, path: str | None, name: str, *values: Any) -> None:
        if path:
            function = load_hook(path, name)
            with hook_errors(f"--{name.replace('_', '-')}", path, function):
                function(self.args, *values)

    def source_errors(self) -> contextlib.AbstractContextManager[None]:
        """What the user's data source raises is blamed on it."""
        return user_errors("--data-source-path", self.args.data_source_path, type(self.source))

    def _counts(self, accepted: int) -> dict[str, float]:
        dropped = sum(self.drops.values())
        counts = {"rollout/failed_groups": float(self.failed_groups)}
        if self.filter is not None:
            counts["rollout/dynamic_filter/dropped_groups"] = float(dropped)
            counts["rollout/dynamic_filter/dropped_ratio"] = dropped / (dropped + accepted)
        return counts | {f"rollout/dynamic_filter/drop_{reason}": float(count) for reason, count in self.drops.items()}


class BatchCollector(GroupWork):
    """Collects one rollout step's groups."""

    def __init__(self, state: GenerateState, rollout_id: int, data_source: Any) -> None:
        super().__init__(state, data_source)
        self.rollout_id = state.rollout_id = rollout_id
        self.accepted: list[Group] = []

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
                    if (group := self.take(task)) is not None:
                        self.accepted.append(group)
            self.accepted.sort(key=group_index)
            groups, surplus = self.accepted[: self.target], self.accepted[self.target :]
            counts = await self._give_back(surplus)
        finally:
            await cancel_all(list(self.pending))
        if self.args.mask_offpolicy_in_partial_rollout:
            counts["rollout/masked_off_policy_tokens"] = mask_off_policy(groups, self.state.engines.version)
        output = self.output(groups, rollout_id=self.rollout_id, seconds=time.monotonic() - begun)
        output.metrics |= counts
        return output

    def _fill(self) -> None:
        """Submit prompts while accepted and running groups are fewer than needed."""
        wave = self.args.over_sampling_batch_size
        while (missing := self.target - len(self.accepted) - len(self.pending)) > 0:
            for group in self.draw(wave if wave is not None else missing):
                self.submit(group, keep=wave is not None)

    async def _wait(self, begun: float) -> list[Task]:
        """Tasks that are done, by group. Deterministic runs wait for all, so that speed decides nothing."""
        when = asyncio.ALL_COMPLETED if self.args.vllm_enable_deterministic_inference else asyncio.FIRST_COMPLETED
        left = self.args.rollout_deadline - (time.monotonic() - begun)
        done, _ = await asyncio.wait(self.pending, timeout=max(left, 0.0), return_when=when)
        if not done or (when == asyncio.ALL_COMPLETED and len(done) < len(self.pending)):
            finished = len(self.accepted) + (len(done) if when == asyncio.ALL_COMPLETED else 0)
            raise DeadlineError(
                peer=f"rollout step {self.rollout_id}",
                phase="generate",
                seconds=self.args.rollout_deadline,
                progress=f"{finished} of {self.target} groups",
                cure="Look for a slow engine, tool or judge; or raise --rollout-deadline.",
            )
        return [task for task in self.pending if task in done]

    async def _give_back(self, surplus: list[Group]) -> dict[str, float]:
        """What is beyond the batch goes back: finished groups as they are, unfinished ones as far as they came, or as they were.

        Returns how many of each, where there can be any.
        """
        if self.args.over_sampling_batch_size is None:
            return {}
        partial: list[Group] = []
        if self.args.partial_rollout:
            for group in await self._abort():
                (partial if unfinished(group) else surplus).append(group)
        fresh = [work.before for work in self.pending.values() if work.before is not None]
        self.give_back([*surplus, *partial, *fresh])
        self.finished = [group for group in self.finished if not any(group is other for other in surplus)]  # seen when it is used
        counts = {"finished": len(surplus), "partial": len(partial), "unfinished": len(fresh)}
        return {f"rollout/given_back/{kind}": float(count) for kind, count in counts.items()}

    async def _abort(self) -> list[Group]:
        """End what runs: groups as far as they came. What does not return within ABORT_SECONDS stays in `pending`."""
        self.state.aborted = True
        end = time.monotonic() + ABORT_SECONDS
        while (running := [task for task in self.pending if not task.done()]) and time.monotonic() < end:
            await asyncio.to_thread(self.state.engines.abort)
            await asyncio.wait(running, timeout=ABORT_AGAIN)
        groups = []
        for task in [task for task in self.pending if task.done()]:
            before = self.pending[task].before
            group = self.take(task)
            if group is not None and not can_go_on(group):
                group = before
            if group is not None:
                groups.append(group)
        for group in groups:
            for part in segments(group):
                if part.response_length:
                    part.metadata.setdefault("start_rollout_id", self.rollout_id)
        return groups


def _copied(group: Group) -> Group:
    return [[fresh_copy(part) for part in member] if isinstance(member, list) else fresh_copy(member) for member in group]


def unfinished(group: Group) -> bool:
    """Whether something of it is still to be generated."""
    return any(part.status in (Sample.Status.ABORTED, Sample.Status.PENDING) for part in segments(group))


def can_go_on(group: Group) -> bool:
    """Whether an unfinished group can be given in again as it is: a fan-out that was cut off cannot, its execution begins anew."""
    return not any(isinstance(member, list) and unfinished([*member]) for member in group)


def mask_off_policy(groups: list[Group], version: int | None) -> float:
    """Set the loss mask of tokens to 0 that were sampled under other weights than `version` (None: than the newest in `groups`).

    Returns how many tokens that took out of the loss.
    """
    parts = [part for group in groups for part in usable(group)]
    known = [int(v) for part in parts for v in part.weight_versions if v.isdecimal()]
    current = str(max(known, default=0) if version is None else version)
    count = 0
    for part in parts:
        old = [v.isdecimal() and v != current for v in part.weight_versions]
        if any(old):
            mask = part.loss_mask if part.loss_mask is not None else [1] * part.response_length
            count += sum(m for m, off in zip(mask, old, strict=True) if off)
            part.loss_mask = [0 if off else m for m, off in zip(mask, old, strict=True)]
    return float(count)


async def cancel_all(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel and await; work that does not end within CANCEL_SECONDS is left to the loop's end."""
    for task in tasks:
        task.cancel()
    if tasks:
        done, _ = await asyncio.wait(tasks, timeout=CANCEL_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()  # taken note of: the first error is already on its way up


def group_index(group: Group) -> int:
    """What groups are ordered by."""
    index = next(segments(group)).group_index
    return -1 if index is None else index
