"""Reading the tensors of a Hugging Face folder: safetensors files, one or many with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from vime.errors import CheckpointError

__all__ = ["HFFolder"]

AGAIN = "Copy or download the folder again."
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
STACKED = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")  # derived, not weights


class HFFolder:
    """The tensors of a folder by name, read one at a time. Use as a context manager.

    Raises CheckpointError, naming file and tensor, for whatever is torn: a missing shard, a truncated file, a tensor that
    is missing or has another shape. Experts that are stored as one tensor a layer ([experts, 2 x size, hidden] for gates above
    ups, [experts, hidden, size]) are read one by one, under the names that they have in other folders.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._open: dict[str, safe_open] = {}
        self._file_of = self._read_names()
        self._part_of: dict[str, tuple[str, int, slice]] = {}  # name -> (stored name, which expert, which of its rows)
        self._take_stacks_apart()

    @property
    def names(self) -> set[str]:
        """All tensor names."""
        return set(self._file_of)

    def names_under(self, beginnings: tuple[str, ...]) -> list[str]:
        """The names that begin with one of these, sorted."""
        return sorted(name for name in self._file_of if name.startswith(beginnings)) if beginnings else []

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that is there."""
        stored, _, rows = self._part_of.get(name, (name, 0, slice(None)))
        found = tuple(self._handle(self._file_of[name]).get_slice(stored).get_shape())
        return (len(range(*rows.indices(found[1]))), *found[2:]) if name in self._part_of else found

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor, on the CPU, in the dtype in which it is stored."""
        file = self.check(name, shape)
        try:
            if name in self._part_of:
                stored, expert, rows = self._part_of[name]
                return self._handle(file).get_slice(stored)[expert : expert + 1, rows][0]
            return self._handle(file).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self._folder / file} does not hold tensor '{name}' ({error}). {AGAIN}") from None

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors are the same bits."""
        return self.shape(name) == self.shape(other) and torch.equal(*(self.tensor(one, self.shape(one)) for one in (name, other)))

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tensor is stored; its data is not read. Raises CheckpointError for one that is no plain number format."""
        file = self._file_of[name]
        kind = self._handle(file).get_slice(self._part_of.get(name, (name,))[0]).get_dtype()
        if kind not in DTYPES:
            raise CheckpointError(f"tensor '{name}' in {self._folder / file} is stored as {kind}: only {', '.join(DTYPES)} are read.")
        return DTYPES[kind]

    def check(self, name: str, shape: tuple[int, ...]) -> str:
        """The file that holds a tensor, which is there and has this shape; its data is not read."""
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(f"tensor '{name}' is missing in {self._folder} ({len(self._file_of)} others are there). {AGAIN}")
        try:
            found = self.shape(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self._folder / file} does not hold tensor '{name}' ({error}). {AGAIN}") from None
        if found != shape:
            raise CheckpointError(
                f"tensor '{name}' in {self._folder / file} has shape {list(found)}, config.json implies {list(shape)}. "
                "Weights and config.json are of different models."
            )
        return file

    def check_no_others(self, known: Iterable[str]) -> None:
        """Raise CheckpointError when the folder holds tensors that the architecture does not have."""
        others = sorted(name for name in self.names - set(known) if not name.endswith(IGNORED_SUFFIXES))
        if others:
            shown = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
            raise CheckpointError(
                f"{self._folder} holds {len(others)} tensors that the architecture in config.json does not have: {shown}. "
                "Weights and config.json are of different models."
            )

    def __enter__(self) -> HFFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.clear()

    def _handle(self, file: str) -> safe_open:
        if file not in self._open:
            try:
                self._open[file] = safe_open(str(self._folder / file), framework="pt", device="cpu")
            except FileNotFoundError:
                raise CheckpointError(f"{self._folder / file} is missing, though {INDEX} names it. {AGAIN}") from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self._folder / file} is torn ({error}). {AGAIN}") from None
        return self._open[file]

    def _take_stacks_apart(self) -> None:
        """Name each expert of a stored stack by itself; what is carried keeps its names."""
        for stored in [name for name in self._file_of if STACKED.search(name) and not name.startswith("mtp.")]:
            file = self._file_of.pop(stored)
            shape = self._handle(file).get_slice(stored).get_shape()
            layer, _, kind = stored.rpartition(".")
            half = shape[1] // 2
            parts = {"down_proj": slice(None)} if kind == "down_proj" else {"gate_proj": slice(0, half), "up_proj": slice(half, None)}
            for expert in range(shape[0]):
                for part, rows in parts.items():
                    name = f"{layer}.{expert}.{part}.weight"
                    self._file_of[name] = file
                    self._part_of[name] = (stored, expert, rows)

    def _read_names(self) -> dict[str, str]:
        """tensor name -> file."""
        index = self._folder / INDEX
        if index.exists():
            try:
                names = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{index} cannot be read ({type(error).__name__}: {error}). {AGAIN}") from None
            for file in sorted(set(names.values())):
                if not (self._folder / file).exists():
                    lost = sorted(name for name, where in names.items() if where == file)
                    raise CheckpointError(
                        f"{self._folder / file} is missing; {INDEX} says it holds {len(lost)} tensors, '{lost[0]}' first. {AGAIN}"
                    )
            return names
        if not (self._folder / SINGLE).exists():
            raise CheckpointError(f"{self._folder} holds neither {SINGLE} nor {INDEX}. Only safetensors weights are read. {AGAIN}")
        return dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)
