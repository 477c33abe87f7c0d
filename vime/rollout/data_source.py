"""Data sources: they hand out groups of samples to generate, and take back what was not used.

prompts (file) ──▶ get_samples(n) ──▶ rollout function
                        ▲                   │
                     buffer ◀── add_samples ┘   (surplus groups, finished or fresh)
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from vime.data.prompts import PromptFormat, fresh_copy
from vime.data.stream import Draw, PromptStreams
from vime.errors import CheckpointError, DataError
from vime.hooks import hook_errors, load_hook
from vime.rollout.base_types import Group
from vime.rollout.buffer import GroupBuffer, pop_first
from vime.rollout.ledger import State
from vime.rollout.resources import RolloutResources
from vime.rollout.rm_hub.registry import needs_label
from vime.utils.types import Sample

__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "SourceObserver", "member_from_plain", "member_to_plain"]

FORMAT = 3  # of the saved state


class SourceObserver(Protocol):
    """Who wants to know what the data source does beside handing out and taking back."""

    def drawn(self, draws: list[Draw], group: int) -> None:
        """Rows were drawn for a fresh group: those that are left out, its own the last."""
        ...

    def gave_up(self, groups: Sequence[Group], state: State, reason: str) -> None:
        """Groups of the buffer are not kept any more."""
        ...


@runtime_checkable
class DataSource(Protocol):
    """What `--data-source-path` must name: a class called as `cls(args)`."""

    def get_samples(self, num_samples: int) -> list[Group]:
        """`num_samples` groups of `n_samples_per_prompt` samples each, ids assigned."""
        ...

    def add_samples(self, samples: list[Group]) -> None:
        """Take groups back; they are handed out again before fresh ones."""
        ...

    def save(self, path: str) -> None:
        """Write everything needed to go on exactly here."""
        ...

    def load(self, path: str) -> None:
        """Go on from what `save` wrote."""
        ...

    def __len__(self) -> int:
        """Number of prompts."""
        ...


class RolloutDataSource:
    """Prompts of `--prompt-data`, epoch after epoch; gives nothing back.

    Without `--prompt-data` the groups hold empty samples, for rollout functions that make their own prompts.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.resources = RolloutResources(args.hf_checkpoint)
        self.observer: SourceObserver | None = None
        self.rollout_id: int | None = None  # the step that groups are taken for
        self.sample_group_index = 0
        self.sample_index = 0
        self.metadata: dict[str, Any] = {}  # saved along; for subclasses
        self._prompts: PromptStreams | None = None
        if args.prompt_data is not None:
            self._prompts = PromptStreams(
                args.prompt_data,
                PromptFormat.of(args, needs_label=needs_label()),
                self.resources.tokenizer,
                shuffle_seed=args.rollout_seed if args.rollout_shuffle else None,
                skip_bad=args.bad_row_policy == "skip",
            )

    def __len__(self) -> int:
        return 0 if self._prompts is None else len(self._prompts)

    @property
    def epoch_id(self) -> int:
        """Whole passes over the prompts."""
        return 0 if self._prompts is None else self._prompts.epoch

    @property
    def sample_offset(self) -> int:
        """Rows of this pass gone by."""
        return 0 if self._prompts is None else self._prompts.offset

    def metrics(self) -> dict[str, float]:
        """rollout/epoch, rollout/dropped_prompts (too long) and rollout/bad_rows (malformed), found so far."""
        if self._prompts is None:
            return {}
        return {
            "rollout/epoch": float(self.epoch_id),
            "rollout/dropped_prompts": float(self._prompts.num_dropped),
            "rollout/bad_rows": float(self._prompts.num_bad),
        }

    def get_samples(self, num_samples: int) -> list[Group]:
        """`num_samples` fresh groups; runs through as many epochs as that takes."""
        return [self._fresh() for _ in range(num_samples)]

    def add_samples(self, samples: list[Group]) -> None:
        """Refused: this source does not keep groups."""
        raise DataError(
            f"{type(self).__name__} takes no groups back ({len(samples)} given); use --data-source-path "
            "vime.rollout.data_source.RolloutDataSourceWithBuffer."
        )

    def save(self, path: str) -> None:
        """Write the state as JSON to the file `path`; it is complete or not there at all."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(file.name + ".partial")
        with partial.open("w", encoding="utf-8") as out:
            json.dump(self.state_dict(), out)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)

    def load(self, path: str) -> None:
        """Go on from the file that `save` wrote.

        Raises:
            CheckpointError: the file is missing or torn.
            DataError: it was saved with other prompts.
        """
        try:
            state = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: no saved data source there. Load a complete commit.") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: the saved data source is torn ({error}). Load an earlier commit.") from error
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise CheckpointError(f"{path}: not a data source saved by this version of vime (format {FORMAT} expected).")
        self.load_state_dict(state, path)

    def state_dict(self) -> dict[str, Any]:
        """The complete state as plain JSON values."""
        return {
            "format": FORMAT,
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "prompts": None if self._prompts is None else self._prompts.state_dict(),
            "metadata": _plain(self.metadata, "data source metadata"),
        }

    def load_state_dict(self, state: dict[str, Any], path: str) -> None:
        """Take over a state; `path` is named in errors."""
        if (state["prompts"] is None) != (self._prompts is None):
            raise DataError(f"{path} was saved {'without' if self._prompts else 'with'} --prompt-data. Give the run the same data.")
        if self._prompts is not None:
            self._prompts.load_state_dict(state["prompts"], path=path, prompt_data=self.args.prompt_data)
        for name in ("sample_group_index", "sample_index", "metadata"):
            setattr(self, name, state[name])

    def close(self) -> None:
        """End what the run's rollouts shared."""
        self.resources.close()

    def describe(self) -> dict[str, Any]:
        """What the ledger says of the data: the order of the rows follows from it."""
        return {"prompts": None if self._prompts is None else self._prompts.describe()}

    def _fresh(self) -> Group:
        """The next prompt's group."""
        if self._prompts is None:
            return self._group(Sample())
        prompt, draws = self._prompts.next()
        if self.observer is not None:
            self.observer.drawn(draws, self.sample_group_index)
        return self._group(prompt)

    def _group(self, prompt: Sample) -> Group:
        group: Group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = fresh_copy(prompt)
            sample.group_index, sample.index = self.sample_group_index, self.sample_index
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Fresh prompts, after the groups that were given back. The buffer is part of the saved state."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self._buffer = GroupBuffer(
            limit=args.buffer_max_groups,
            drop=(lambda groups, why: self._gave_up(groups, State.DROPPED, why)) if args.buffer_overflow == "drop" else None,
        )
        path = args.buffer_filter_path
        self._filter = load_hook(path, "buffer_filter_path") if path else pop_first

    @property
    def buffer(self) -> list[Group]:
        """The groups that wait, in the order in which they are served (see `vime.rollout.buffer`)."""
        return self._buffer.groups

    def get_samples(self, num_samples: int) -> list[Group]:
        """From the buffer what --buffer-filter-path takes (by default the first), then fresh groups.

        Raises:
            DataError: the filter took out of the buffer what it did not return, or the other way round.
        """
        taken, removed = self._buffer.take(num_samples, self._choose) if len(self._buffer) else ([], [])
        if removed:
            self._gave_up(removed, State.FILTERED, "--buffer-filter-path took it out")
        return taken + super().get_samples(max(0, num_samples - len(taken)))

    def add_samples(self, samples: list[Group]) -> None:
        """Keep groups for later: finished ones, partial ones (tokens, log-probs and weight versions stay) or fresh ones.

        Raises:
            DataError: a group is not a list of `n_samples_per_prompt` members, or the buffer is full.
        """
        for group in samples:
            if not isinstance(group, list) or len(group) != self.args.n_samples_per_prompt:
                size = len(group) if isinstance(group, list) else type(group).__name__
                raise DataError(
                    f"add_samples: a group must be a list of n_samples_per_prompt = {self.args.n_samples_per_prompt} samples, got {size}."
                )
        self._buffer.add(samples)

    def get_buffer_length(self) -> int:
        """Groups that wait in the buffer."""
        return len(self._buffer)

    def metrics(self) -> dict[str, float]:
        """Those of the prompts, and buffer/{finished,partial,fresh}_groups: what waits in the buffer."""
        return super().metrics() | self._buffer.counts()

    def state_dict(self) -> dict[str, Any]:
        """The complete state, buffer included."""
        return {**super().state_dict(), "buffer": [[member_to_plain(member) for member in group] for group in self.buffer]}

    def load_state_dict(self, state: dict[str, Any], path: str) -> None:
        """Take over a state, buffer included."""
        super().load_state_dict(state, path)
        self._buffer.add([[member_from_plain(member) for member in group] for group in state.get("buffer", [])])

    def _choose(self, buffer: list[Group], num_samples: int) -> list[Group]:
        path = self.args.buffer_filter_path
        with hook_errors("--buffer-filter-path", str(path), self._filter):
            return list(self._filter(self.args, self.rollout_id, buffer, num_samples))

    def _gave_up(self, groups: Sequence[Group], state: State, reason: str) -> None:
        if self.observer is not None:
            self.observer.gave_up(groups, state, reason)


def member_to_plain(member: Sample | list[Sample]) -> Any:
    """A sample, or the segments of a fan-out, as plain JSON values. Raises DataError for what has no JSON form."""
    if isinstance(member, list):
        return [member_to_plain(segment) for segment in member]
    return _plain(member.to_dict(), f"sample {member.index}")


def member_from_plain(data: Any) -> Sample | list[Sample]:
    """The inverse of `member_to_plain`."""
    if isinstance(data, list):
        return [Sample.from_dict(segment) for segment in data]
    return Sample.from_dict(data)


def _plain(value: Any, where: str) -> Any:
    """`value`, when JSON gives it back unchanged (tuples become lists)."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{position}]") for position, item in enumerate(value)]
    if isinstance(value, dict):
        value = value.copy()  # a rollout function that runs ahead may write into the metadata meanwhile
        odd = next((key for key in value if not isinstance(key, str)), None)
        if odd is not None:
            raise DataError(f"{where} cannot be saved: key {odd!r} is no string. Use string keys in metadata.")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return _plain(value.item(), where)  # a number of numpy or torch
    raise DataError(
        f"{where} cannot be saved: a {type(value).__name__} has no JSON form. Keep plain values (numbers, text, lists, dicts) in samples."
    )
