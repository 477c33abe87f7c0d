"""Prompts without end: each source epoch after epoch, several by their weights. Rows are read when they are drawn.

What a row costs is paid once it is drawn: a million rows start in seconds. The first LOOK_AHEAD rows of a source are looked
at when it is opened, so that a wrong column or a limit that nothing meets is found before the run begins.
"""

from __future__ import annotations

import logging
import random
from array import array
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import xxhash

from vime.config.prompt_sources import Source, split_sources
from vime.data.prompts import PromptFormat, prompt_length, sample_from_row
from vime.data.tables import Table, join_tables, open_table
from vime.errors import DataError
from vime.utils.types import Sample

__all__ = ["LOOK_AHEAD", "PromptStreams"]

logger = logging.getLogger(__name__)

LOOK_AHEAD = 2_000  # rows of a source that are read when it is opened
REMEMBERED = 20_000  # rendered prompts of a source that are kept in memory
NAMED = 5  # malformed rows that are named in the log


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
        self._order: Sequence[int] = range(len(self.table))
        if self._shuffle_seed is not None:
            self._order = array("q", self._order)
            random.Random(self._shuffle_seed + epoch).shuffle(self._order)

    def next(self) -> Sample:
        """The next prompt; what is left out is passed over."""
        for _ in range(len(self.table) + 1):
            if self.offset >= len(self.table):
                self.seek(self.epoch + 1, 0)
            number = self._order[self.offset]
            self.offset += 1
            sample = None if number in self.long or number in self.bad else self._read(number)
            if sample is not None:
                return sample
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

    def next(self) -> Sample:
        """The next prompt; belongs to the streams, so copy it."""
        at = min(range(len(self._streams)), key=lambda i: (self._drawn[i] + 1) / self._weights[i])
        self._drawn[at] += 1
        return self._streams[at].next()

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
