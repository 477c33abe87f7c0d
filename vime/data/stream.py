"""Prompts without end: each source epoch after epoch, several by their weights. Rows are read when they are drawn.

What a row costs is paid once it is drawn: a million rows start in seconds. The first LOOK_AHEAD rows of a source are looked
at when it is opened, so that a wrong column or a limit that nothing meets is found before the run begins.
"""

from __future__ import annotations

import logging
import random
from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import xxhash

from vime.config.prompt_sources import Source, split_sources
from vime.data.prompts import PromptFormat, prompt_length, sample_from_row
from vime.data.tables import Table, join_tables, open_table
from vime.errors import DataError
from vime.utils.types import Sample

__all__ = ["LOOK_AHEAD", "TOO_LONG", "Draw", "PromptStreams", "epoch_order"]

logger = logging.getLogger(__name__)

LOOK_AHEAD = 2_000  # rows of a source that are read when it is opened
REMEMBERED = 20_000  # rendered prompts of a source that are kept in memory
NAMED = 5  # malformed rows that are named in the log
TOO_LONG, MALFORMED = "too long", "malformed"  # why a row is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A row whose turn has come."""

    source: int  # which of --prompt-data's weighted sources
    epoch: int  # of that source
    position: int  # in the epoch's order, from 0
    row: int  # in the source, from 0
    file: str
    line: int  # from 1
    unit: str  # "line", or "row" of a table
    reason: str | None = None  # why it is left out; None: it gave a prompt


class _Stream:
    """One source."""

    def __init__(self, name: str, table: Table, form: PromptFormat, tokenizer: Any, *, shuffle_seed: int | None, skip_bad: bool) -> None:
        self.name, self.table = name, table
        self._form, self._tokenizer, self._shuffle_seed, self._skip_bad = form, tokenizer, shuffle_seed, skip_bad
        self.long: set[int] = set()  # rows known to be longer than the limit
        self.bad: set[int] = set()  # rows known to be malformed
        self._remembered: dict[int, Sample] = {}
        self.seek(0, 0)
        looked_at = min(LOOK_AHEAD, len(table))
        for number in range(looked_at):
            self._read(number)
        if len(self.long) + len(self.bad) == len(table):
            raise self._nothing_left()

    def seek(self, epoch: int, offset: int) -> None:
        """Go to the place after `offset` rows of `epoch`."""
        self.epoch, self.offset = epoch, offset
        self._order = epoch_order(len(self.table), self._shuffle_seed, epoch)

    def next(self, source: int) -> tuple[Sample, list[Draw]]:
        """The next prompt, and the rows drawn for it: those that are left out, and its own. `source` is the stream's number."""
        draws: list[Draw] = []
        for _ in range(len(self.table) + 1):
            if self.offset >= len(self.table):
                self.seek(self.epoch + 1, 0)
            number = self._order[self.offset]
            sample = None if number in self.long or number in self.bad else self._read(number)
            reason = None if sample is not None else TOO_LONG if number in self.long else MALFORMED
            file, line, unit = self.table.place(number)
            place = {"source": source, "epoch": self.epoch, "position": self.offset, "row": number}
            draws.append(Draw(**place, file=file, line=line, unit=unit, reason=reason))
            self.offset += 1
            if sample is not None:
                return sample, draws
        raise self._nothing_left()

    def _read(self, number: int) -> Sample | None:
        """The prompt of a row, or None when it is left out."""
        known = self._remembered.get(number)
        if known is not None:
            return known
        try:
            row = self.table.row(number)
            sample = sample_from_row(row, self._form, self._tokenizer)
            limit = self._form.max_prompt_len
            too_long = limit is not None and prompt_length(sample, row, self._tokenizer) > limit
        except DataError as error:
            if not self._skip_bad:
                raise
            self.bad.add(number)
            if len(self.bad) <= NAMED:
                logger.warning("left out, %d so far: %s", len(self.bad), error)
            return None
        if too_long:
            self.long.add(number)
            return None
        if len(self._remembered) < REMEMBERED:
            self._remembered[number] = sample
        return sample

    def _nothing_left(self) -> DataError:
        if self.bad:
            return DataError(
                f"{self.name}: of {len(self.table)} rows {len(self.bad)} are malformed and {len(self.long)} prompts are too long; "
                "none is left. The log names the first ones."
            )
        return DataError(
            f"{self.name}: all {len(self.table)} prompts are longer than {self._form.max_prompt_len} tokens. "
            "Raise --rollout-max-prompt-len (and --rollout-max-context-len), or give shorter prompts."
        )


def epoch_order(num_rows: int, shuffle_seed: int | None, epoch: int) -> Sequence[int]:
    """Row numbers in the order in which an epoch draws them."""
    if shuffle_seed is None:
        return range(num_rows)
    order = array("q", range(num_rows))
    random.Random(shuffle_seed + epoch).shuffle(order)
    return order


class PromptStreams:
    """The sources of --prompt-data. With weights, each source is drawn from in their proportion, at every moment as nearly as
    whole prompts allow; without, they are one source, one file after the other.

    Raises:
        DataError: as `open_table`; a row that is looked at is malformed (unless `skip_bad`); no prompt is left.
        ConfigError: the sources are not named right.
    """

    def __init__(self, prompt_data: str, form: PromptFormat, tokenizer: Any, *, shuffle_seed: int | None, skip_bad: bool) -> None:
        sources = split_sources(prompt_data)
        self._identity = [
            astuple(form),
            getattr(tokenizer, "chat_template", None) if form.apply_chat_template else None,
            shuffle_seed,
            [source.weight for source in sources],
        ]
        self._shuffle_seed = shuffle_seed
        options: dict[str, Any] = {"shuffle_seed": shuffle_seed, "skip_bad": skip_bad}
        self._streams = [
            _Stream(f"--prompt-data {name}", table, form, tokenizer, **options) for name, table in _tables(prompt_data, sources)
        ]
        self._weights = [source.weight or 1.0 for source in sources]
        self._drawn = [0] * len(self._streams)
        self._say_what_is_left_out()

    def __len__(self) -> int:
        """Prompts, less those known to be left out."""
        return sum(len(stream.table) for stream in self._streams) - self.num_dropped - self.num_bad

    @property
    def num_dropped(self) -> int:
        """Prompts found longer than the limit so far."""
        return sum(len(stream.long) for stream in self._streams)

    @property
    def num_bad(self) -> int:
        """Rows found malformed so far."""
        return sum(len(stream.bad) for stream in self._streams)

    @property
    def epoch(self) -> int:
        """Whole passes over the source that has had the fewest."""
        return min(stream.epoch for stream in self._streams)

    @property
    def offset(self) -> int:
        """Rows gone by in the present pass, over all sources."""
        return sum(stream.offset for stream in self._streams)

    def next(self) -> tuple[Sample, list[Draw]]:
        """The next prompt (it belongs to the streams, so copy it), and the rows drawn for it, its own the last."""
        at = min(range(len(self._streams)), key=lambda i: (self._drawn[i] + 1) / self._weights[i])
        self._drawn[at] += 1
        return self._streams[at].next(at)

    def describe(self) -> dict[str, Any]:
        """What the order of the rows follows from: sources with their numbers of rows, and the seed that shuffles each epoch."""
        return {
            "digest": self._digest(),
            "shuffle_seed": self._shuffle_seed,
            "sources": [{"name": stream.name, "rows": len(stream.table)} for stream in self._streams],
        }

    def state_dict(self) -> dict[str, Any]:
        """Where each source stands, and a digest of what they hold."""
        places = [
            {"epoch": stream.epoch, "offset": stream.offset, "drawn": drawn}
            for stream, drawn in zip(self._streams, self._drawn, strict=True)
        ]
        return {"digest": self._digest(), "num_rows": sum(len(stream.table) for stream in self._streams), "places": places}

    def load_state_dict(self, state: dict[str, Any], *, path: str, prompt_data: str) -> None:
        """Go on there. Raises DataError when the state is of other prompts."""
        if state["digest"] != self._digest():
            raise DataError(
                f"{path} was saved with {state['num_rows']} prompts; --prompt-data {prompt_data} gives "
                f"{sum(len(stream.table) for stream in self._streams)}, or others, so the run cannot go on exactly. "
                "Give the same prompts and template, or start in another --save folder."
            )
        for stream, place in zip(self._streams, state["places"], strict=True):
            stream.seek(place["epoch"], place["offset"])
        self._drawn = [place["drawn"] for place in state["places"]]

    def _digest(self) -> str:
        """Identifies prompts, how they are rendered, their order, and how the epochs shuffle them."""
        parts = [repr(self._identity), *(stream.table.digest() for stream in self._streams)]
        return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())

    def _say_what_is_left_out(self) -> None:
        for stream in self._streams:
            looked_at = min(LOOK_AHEAD, len(stream.table))
            rest = "" if looked_at == len(stream.table) else f" first (of {len(stream.table)}; the others are measured when they are drawn)"
            if stream.long:
                logger.warning(
                    "%s: %d of %d prompts%s are longer than --rollout-max-prompt-len (default: context - 1) and are dropped.",
                    stream.name, len(stream.long), looked_at, rest,
                )  # fmt: skip
            if stream.bad:
                logger.warning("%s: %d of %d rows%s are malformed and are left out.", stream.name, len(stream.bad), looked_at, rest)


def _tables(prompt_data: str, sources: Sequence[Source]) -> list[tuple[str, Table]]:
    """(name, table) of each stream."""
    tables = [open_table(source.spec) for source in sources]
    if sources[0].weight is None:
        return [(prompt_data, join_tables(tables))]
    return [(source.spec, table) for source, table in zip(sources, tables, strict=True)]
