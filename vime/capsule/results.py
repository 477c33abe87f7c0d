"""What a training step's stages gave, in a form that does not depend on the layout: rows of samples, parameters and metrics.

stage       what is kept of it
tokenize    tokens; the prompt's text encoded anew
pack        loss masks, weights in the step's mean, kept sets, denominators, micro-batches
forward     weights before the step, random states, routing, mean and root mean square of the logits
log-prob    the engine's, the policy's, old, reference and teacher log-probs
advantage   rewards, values, advantages, returns
loss        each optimizer step's loss and metrics
gradient    each optimizer step's gradient
update      the weights after each optimizer step
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vime.errors import DataError
from vime.types import TrainSample

__all__ = ["STAGES", "Item", "ParameterRows", "SampleRows", "in_order", "items_of_samples", "load_items", "save_items", "strided"]

STAGES = ("tokenize", "pack", "forward", "log-prob", "advantage", "loss", "gradient", "update")
KEPT_VALUES = 4096  # of each parameter: small ones are there whole
Key = tuple[str, str]  # stage, name
INDEX = "results.json"
TENSORS = "results.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One result of a stage. Row i, a tensor [n, ...], is of `labels[i]`: a sample, a parameter, a metric."""

    stage: str
    name: str
    labels: tuple[str, ...]
    rows: tuple[torch.Tensor, ...]
    step: int | None = None  # optimizer step within the rollout step
    exact: bool = False  # no layout changes it: equal bit for bit, or it differs
    of_layout: bool = False  # the layout decides it: compared in the same layout only
    digests: tuple[str, ...] = ()  # of the whole of each row, where rows are `KEPT_VALUES` values of something larger
    strides: tuple[float, ...] = ()  # then: how far apart these values lie

    @property
    def order(self) -> tuple[int, int]:
        """Where the item comes in the step: the stages up to the advantage once, then the others for each optimizer step."""
        return (-1 if self.step is None else self.step), STAGES.index(self.stage)


@dataclass(slots=True, kw_only=True)
class SampleRows:
    """One sample's rows by (stage, name). `origin`: (data-parallel rank, its place there)."""

    sample: TrainSample
    origin: tuple[int, int]
    rows: dict[Key, torch.Tensor] = field(default_factory=dict)


def in_order(samples: Iterable[SampleRows]) -> list[SampleRows]:
    """The samples of all ranks in an order that no layout changes."""
    return sorted(samples, key=lambda one: (one.sample.sample_id, one.sample.tokens.tolist()))


def items_of_samples(samples: Sequence[SampleRows], exact: Collection[Key], of_layout: Collection[Key]) -> list[Item]:
    """`in_order` samples as items, one a (stage, name) that all of them have."""
    labels, seen = [], dict[int, int]()
    for one in samples:
        number = seen[one.sample.sample_id] = seen.get(one.sample.sample_id, 0) + 1
        labels.append(f"sample {one.sample.sample_id}" + (f" (segment {number})" if number > 1 else ""))
    keys = [key for key in (samples[0].rows if samples else ()) if all(key in one.rows for one in samples)]
    return [
        Item(
            stage=stage, name=name, labels=tuple(labels), rows=tuple(one.rows[stage, name] for one in samples),
            exact=(stage, name) in exact, of_layout=(stage, name) in of_layout,
        )
        for stage, name in keys
    ]  # fmt: skip


def strided(tensor: torch.Tensor) -> tuple[torch.Tensor, float]:
    """(at most `KEPT_VALUES` values of a tensor, evenly spread over its elements, on the CPU; how far apart they are)."""
    flat = tensor.detach().reshape(-1)
    count = min(len(flat), KEPT_VALUES)
    places = torch.arange(count, device=flat.device) * len(flat) // max(count, 1)
    return flat[places].float().cpu(), len(flat) / max(count, 1)


class ParameterRows:
    """Collects whole parameters one by one: of each its digest and the values that `strided` keeps."""

    def __init__(self) -> None:
        self._labels: list[str] = []
        self._rows: list[torch.Tensor] = []
        self._digests: list[str] = []
        self._strides: list[float] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """One whole parameter."""
        row, stride = strided(tensor)
        raw = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        self._labels.append(name)
        self._rows.append(row)
        self._digests.append(xxhash.xxh3_128_hexdigest(memoryview(raw.numpy())))
        self._strides.append(stride)

    def item(self, stage: str, name: str, *, step: int | None = None, exact: bool = False) -> Item:
        """All of them as one item."""
        return Item(
            stage=stage, name=name, step=step, exact=exact, labels=tuple(self._labels), rows=tuple(self._rows),
            digests=tuple(self._digests), strides=tuple(self._strides),
        )  # fmt: skip


def save_items(folder: Path, items: Sequence[Item]) -> None:
    """Write FOLDER/results.json and FOLDER/results.safetensors. Raises OSError."""
    index, tensors = [], {}
    for number, item in enumerate(items):
        index.append({
            "stage": item.stage, "name": item.name, "step": item.step, "exact": item.exact, "of_layout": item.of_layout,
            "labels": item.labels, "lengths": [len(row) for row in item.rows], "digests": item.digests, "strides": item.strides,
        })  # fmt: skip
        if item.rows:
            tensors[str(number)] = torch.cat([row.cpu() for row in item.rows]).contiguous()
    (folder / INDEX).write_text(json.dumps(index))
    try:
        save_file(tensors, str(folder / TENSORS))
    except SafetensorError as error:  # an I/O error in its clothes
        raise OSError(str(error)) from error


def load_items(folder: Path) -> list[Item]:
    """What `save_items` wrote. Raises DataError when it is torn."""
    try:
        index = json.loads((folder / INDEX).read_text())
        tensors = load_file(str(folder / TENSORS))
        return [_item(entry, tensors.get(str(number))) for number, entry in enumerate(index)]
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"the capsule's results in {folder} cannot be read ({reason}). Record the step again.") from error


def _item(entry: dict[str, Any], tensor: torch.Tensor | None) -> Item:
    lengths = entry.pop("lengths")
    rows = () if tensor is None else torch.split(tensor, lengths)
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    return Item(rows=tuple(rows), **fields)
