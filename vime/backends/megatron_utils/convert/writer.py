"""Writing a Hugging Face folder: safetensors shards with an index, one shard in memory at a time, and the small files beside them."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from vime.backends.megatron_utils.convert.folder import INDEX, SINGLE, HFFolder
from vime.backends.megatron_utils.convert.shape import ModelShape
from vime.errors import CheckpointError, ResourceError, VimeError

__all__ = [
    "DEFAULT_SHARD_BYTES",
    "HF_FILES",
    "HFExport",
    "HFWriter",
    "copy_small_files",
    "export_hf",
    "keep_model_files",
    "own_folder",
    "written_by_first",
]

DEFAULT_SHARD_BYTES = 5 * 10**9
ORIGIN = "origin.txt"  # in that folder: the path of the one that was trained
HF_FILES = "hf"  # the folder in a Megatron checkpoint that holds the model's config.json and tokenizer
SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
)  # fmt: skip


def copy_small_files(source: Path, target: Path) -> None:
    """Copy configuration and tokenizer files. Raises ResourceError when they cannot be written."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        for pattern in SMALL_FILES:
            for file in source.glob(pattern):
                shutil.copyfile(file, target / file.name)
    except OSError as error:
        raise _not_written(target, error) from error


def keep_model_files(source: Path, checkpoint: Path) -> None:
    """Put a model's small files into a Megatron checkpoint, and where its folder is, so that it can be converted back."""
    copy_small_files(source, checkpoint / HF_FILES)
    try:
        (checkpoint / HF_FILES / ORIGIN).write_text(str(source.absolute()), encoding="utf-8")
    except OSError as error:
        raise _not_written(checkpoint / HF_FILES, error) from error


def own_folder(kept: Path) -> Path:
    """The model's own folder, of which `kept` in a checkpoint was made; another folder is its own."""
    origin = kept / ORIGIN
    return Path(origin.read_text(encoding="utf-8")) if origin.is_file() else kept


class HFWriter:
    """Takes named tensors one by one and writes them in shards of at most `shard_bytes` (a larger tensor is a shard of its own).

    Until `close`, what the folder held stays as it was, so that an interrupted export costs nothing.
    Raises ResourceError when something cannot be written.
    """

    def __init__(self, folder: Path, shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes
        self._shard: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._total = 0
        self._shards: list[list[str]] = []  # names, by shard
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for stale in folder.glob("model-*.part"):
                stale.unlink()
        except OSError as error:
            raise _not_written(folder, error) from error

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor; it is kept until its shard is full."""
        if self._shard and self._bytes + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._shard[name] = tensor.cpu().contiguous()
        self._bytes += tensor.nbytes

    def add_carried(self, source: Path, carried: tuple[str, ...]) -> None:
        """Take over, unchanged, what the model's folder holds of tensors that are not trained. Raises CheckpointError without it."""
        if not carried:
            return
        folder = own_folder(source)
        if not folder.is_dir():
            raise CheckpointError(
                f"the tensors {', '.join(carried)} are not trained, so they are in the model's own folder alone, and {folder} is not "
                "there: give that folder as --hf-checkpoint."
            )
        with HFFolder(folder) as weights:
            for name in weights.names_under(carried):
                self.add(name, weights.tensor(name, weights.shape(name)))

    def close(self) -> None:
        """Write what is left, give the shards their names, and write the index where there are several."""
        self._flush()
        count = len(self._shards)
        files = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        try:
            for stale in (*self._folder.glob("model*.safetensors"), *self._folder.glob(INDEX)):
                stale.unlink()
            for number, file in enumerate(files):
                self._part(number).rename(self._folder / file)
            if count > 1:
                index = {
                    "metadata": {"total_size": self._total},
                    "weight_map": {name: file for names, file in zip(self._shards, files, strict=True) for name in names},
                }
                (self._folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True), encoding="utf-8")
        except OSError as error:
            raise _not_written(self._folder, error) from error

    def discard(self) -> None:
        """Give up: what was written goes, and its space with it."""
        self._shard = {}
        for part in self._folder.glob("model-*.part"):
            with contextlib.suppress(OSError):
                part.unlink()

    def _part(self, number: int) -> Path:
        return self._folder / f"model-{number:05d}.part"

    def _flush(self) -> None:
        if not self._shard:
            return
        try:
            save_file(self._shard, str(self._part(len(self._shards))), metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise _not_written(self._folder, error) from error
        self._shards.append(list(self._shard))
        self._total += self._bytes
        self._shard, self._bytes = {}, 0


class HFExport:
    """Writes the folder `target` from the named tensors of a model whose own folder is `source`, and keeps what goes wrong until the end.

    Its caller takes part in collectives that must not be left in the middle. `copies`: names under which a tensor is written once more.
    """

    def __init__(self, source: Path, target: Path, carried: tuple[str, ...], copies: Mapping[str, str] = MappingProxyType({})) -> None:
        self._source, self._target, self._carried = source, target, carried
        self._copies = {original: copy for copy, original in copies.items()}
        self._writer: HFWriter | None = None
        self._failure: VimeError | None = None
        self._run(self._start)

    def take(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Write these tensors; nothing after a failure."""
        named = [*named, *((self._copies[name], tensor.clone()) for name, tensor in named if name in self._copies)]
        self._run(lambda writer: [writer.add(name, tensor) for name, tensor in named])

    def finish(self) -> VimeError | None:
        """Complete the folder. Returns what went wrong; the folder then holds what it held before."""
        self._run(self._complete)
        if self._failure is not None and self._writer is not None:
            self._writer.discard()
        return self._failure

    def _start(self, _writer: None) -> None:
        self._writer = HFWriter(self._target)

    def _complete(self, writer: HFWriter) -> None:
        writer.add_carried(self._source, self._carried)
        copy_small_files(self._source, self._target)
        writer.close()

    def _run(self, work: Callable[[Any], object]) -> None:
        if self._failure is None:
            try:
                work(self._writer)
            except VimeError as error:
                self._failure = error


def export_hf(source: Path, target: Path, shape: ModelShape, buckets: Iterable[Sequence[tuple[str, torch.Tensor]]]) -> None:
    """Write the model of this `shape`, whose own folder is `source`, as the folder `target`. Collective: rank 0 gets tensors and writes.

    Raises on all ranks what rank 0 meets: ResourceError when the folder cannot be written.
    """
    export = HFExport(source, target, shape.carried, shape.copies) if dist.get_rank() == 0 else None
    for bucket in buckets:  # to its end, whatever rank 0 meets: the others are sending
        if export is not None:
            export.take(bucket)
    _raise_everywhere(None if export is None else export.finish())


def written_by_first(write: Callable[[], object]) -> None:
    """Let rank 0 `write`, which is not collective. Collective: raises on all ranks what it meets, so that none waits for it."""
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            write()
        except (VimeError, OSError) as error:
            failure = error
    _raise_everywhere(failure)


def _raise_everywhere(failure: Exception | None) -> None:
    """Raise what rank 0 has, on all ranks. Collective."""
    told = [failure]
    dist.broadcast_object_list(told, src=0)
    if told[0] is not None:
        raise told[0]


def _not_written(folder: Path, error: Exception) -> ResourceError:
    return ResourceError(f"the Hugging Face folder {folder} could not be written ({error}). Check the space and the rights there.")
