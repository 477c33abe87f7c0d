"""Reading single tensors of a distributed checkpoint (torch_dist), without a process group and without trusting its index."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from vime.errors import CheckpointError

from megatron.core.dist_checkpointing.mapping import ShardedTensor  # isort: skip  # after vime's package has prepared it

__all__ = ["COMPLETE", "StoredTensors", "stored_sizes"]

COMPLETE = "metadata.json"  # Megatron writes it last
INDEX_TYPES = {  # what an index is made of, beside torch.distributed.checkpoint's own classes
    ("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"), ("torch", "memory_format"),
    ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("collections", "OrderedDict"), ("collections", "defaultdict"),
}  # fmt: skip


class _IndexUnpickler(pickle.Unpickler):
    """Builds nothing but the classes of an index, since the file may be someone else's."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module.split(".")[0] in ("torch", "pathlib", "collections") else None
        own = module.startswith("torch.distributed.checkpoint.") and isinstance(found, type)
        if own or (module, name) in INDEX_TYPES or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into an index")


def stored_sizes(piece: ShardedTensor) -> torch.Size:
    """The size of a piece in the checkpoint, where stacked layers and experts have dimensions of their own."""
    return torch.Size((*(1,) * piece.prepend_axis_num, *piece.local_shape))


class StoredTensors:
    """The tensors of the checkpoint in a folder. Raises CheckpointError for one that is torn, or no checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not (folder / COMPLETE).is_file():
            raise CheckpointError(f"{folder} is no complete Megatron checkpoint: {COMPLETE}, which is written last, is missing.")
        try:
            with (folder / ".metadata").open("rb") as file:
                self._index = _IndexUnpickler(file).load()
            if not isinstance(self._index, Metadata):
                raise TypeError(f"a {type(self._index).__name__}")
        except Exception as error:  # whatever pickle raises for a torn file
            raise self._torn(".metadata", error) from error
        self._targets: dict[tuple[str, torch.Size], torch.Tensor] = {}
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(self._index, is_coordinator=True)

    @property
    def keys(self) -> set[str]:
        """The names of all tensors, optimizer states among them."""
        return {key for key, value in self._index.state_dict_metadata.items() if isinstance(value, TensorStorageMetadata)}

    def shape(self, key: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return tuple(self._tensor(key).size)

    def dtype(self, key: str) -> torch.dtype:
        """Its dtype."""
        return self._tensor(key).properties.dtype

    def read(self, pieces: Sequence[ShardedTensor]) -> None:
        """Fill the data of `pieces`; what reaches beyond a stored tensor (vocabulary padding) stays as it is."""
        targets = {}
        items: list[ReadItem] = []
        for piece in pieces:
            stored, offsets = self._tensor(piece.key), torch.Size(piece.global_offset)
            ends = zip(offsets, stored_sizes(piece), stored.size, strict=True)
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(min(size, whole - at) for at, size, whole in ends))
            targets[piece.key, offsets] = piece.data.view(stored_sizes(piece))
            items += create_read_items_for_chunk_list(piece.key, stored, [chunk])
        self._targets = targets
        try:
            self._reader.read_data(LoadPlan(items), self).wait()  # type: ignore[arg-type]
        except Exception as error:  # whatever torch raises for a torn file
            raise self._torn("a .distcp file", error) from error

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        """For torch's reader: where an item goes."""
        offsets = item.dest_index.offset
        assert offsets is not None
        return narrow_tensor_by_index(self._targets[item.dest_index.fqn, offsets], item.dest_offsets, item.lengths)

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """For torch's reader: it is there."""

    def _tensor(self, key: str) -> TensorStorageMetadata:
        found = self._index.state_dict_metadata[key]
        assert isinstance(found, TensorStorageMetadata)
        return found

    def _torn(self, what: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self._folder} cannot be read: {what} is torn ({type(error).__name__}: {str(error)[:300]}).")
