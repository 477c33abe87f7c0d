"""Between a Hugging Face folder and a Megatron distributed checkpoint (torch_dist), in one process, a few tensors in memory at a time.

What is written loads at any parallel layout; what was saved at any layout is read. A model without memory behind its weights
tells which key, shape and place each parameter has in the checkpoint.
"""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint import save as write_checkpoint
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from vime.backends.megatron_utils import bootstrap
from vime.backends.megatron_utils.convert.adapters import adapters_to_hf
from vime.backends.megatron_utils.convert.folder import HFFolder
from vime.backends.megatron_utils.convert.ops import Op
from vime.backends.megatron_utils.convert.registry import model_ops, model_shape
from vime.backends.megatron_utils.convert.shape import ModelShape, with_prediction
from vime.backends.megatron_utils.convert.stored import COMPLETE, StoredTensors, stored_sizes
from vime.backends.megatron_utils.convert.transfer import check_hf_weights
from vime.backends.megatron_utils.convert.writer import HFWriter, copy_small_files, keep_model_files
from vime.backends.megatron_utils.lora_peft import ADAPTER_FOLDER
from vime.config.run import RunConfig
from vime.config.sections import ModelConfig
from vime.errors import CheckpointError, ResourceError, VimeError

from megatron.core import parallel_state, tensor_parallel  # isort: skip  # after vime's package has prepared it
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory  # isort: skip

__all__ = ["hf_to_megatron", "megatron_to_hf"]

log = logging.getLogger(__name__)
type Entry = ShardedTensor | ShardedTensorFactory


@contextmanager
def _skeleton(folder: Path, *, predicts: bool = False) -> Iterator[tuple[ModelShape, list[Op], dict[str, Entry]]]:
    """(shape, op list, where each Megatron parameter stands in a checkpoint) of the model in an HF folder; its weights are not read.

    `predicts`: with its layers for multi-token prediction.
    """
    shape = with_prediction(model_shape(folder), None) if predicts else model_shape(folder)
    where = bootstrap.Platform(device=torch.device("cpu"), dtype=torch.float32, backend="gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        bootstrap.import_megatron()
        from vime.backends.megatron_utils.arguments import resolve
        from vime.backends.megatron_utils.model import build_model

        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        args = resolve(RunConfig(model=ModelConfig(hf_checkpoint=str(folder))), shape, where, world_size=1)
        args.perform_initialization = False  # memory that is never touched is never had
        (model,) = build_model(args)
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True), "singleton_local_shards": False}
        state = model.sharded_state_dict(metadata=metadata)
        ops = model_ops(shape, args.padded_vocab_size)
        yield shape, ops, {op.megatron: state[op.megatron] for op in ops}
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _pieces(entry: Entry, whole: torch.Tensor) -> list[ShardedTensor]:
    """The tensors under which a parameter with the value `whole` is stored."""
    entry = _with_data(entry, whole)
    if isinstance(entry, ShardedTensor):
        return [entry]
    built = entry.build()
    return list(built.values()) if isinstance(built, dict) else list(built)


def _with_data(entry: Entry, data: torch.Tensor) -> Entry:
    return replace(entry, data=data, dtype=data.dtype) if isinstance(entry, ShardedTensor) else replace(entry, data=data)


def hf_to_megatron(source: Path, target: Path) -> None:
    """Write the weights of the Hugging Face folder `source` as the distributed checkpoint `target`, a new folder.

    Raises CheckpointError for a torn source, ResourceError when `target` cannot be written; it is then removed.
    """
    _check_new(target)
    with _skeleton(source) as (shape, ops, entries), HFFolder(source) as folder:
        check_hf_weights(source, ops, shape)
        partial = target.with_name(target.name + ".part")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            keep_model_files(source, partial)
            write_checkpoint({}, storage_writer=FileSystemWriter(partial), planner=_Planner(folder, ops, entries), no_dist=True)
            (partial / COMPLETE).write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
            partial.rename(target)
        except (OSError, RuntimeError, CheckpointException) as error:
            first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            if isinstance(first, VimeError):  # the source, not the target
                raise first from error
            raise ResourceError(f"{target} could not be written ({first}). Check the space and the rights there.") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


class _Planner(SavePlanner):
    """Names all tensors of a checkpoint and makes each one when it is written."""

    COMMON = ShardedObject("common_state", None, (1,), (0,)).unique_key

    def __init__(self, folder: HFFolder, ops: Sequence[Op], entries: dict[str, Entry]) -> None:
        self._folder, self._ops, self._entries = folder, ops, entries
        self._source: dict[MetadataIndex, tuple[int, int]] = {}
        self._last: tuple[int, list[ShardedTensor]] = (-1, [])

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(index=MetadataIndex(self.COMMON), type=WriteItemType.BYTE_IO)]
        for number, op in enumerate(self._ops):
            shapes = zip(op.hf, op.hf_shapes, strict=True)
            parts = [torch.empty(shape, dtype=self._folder.dtype(name), device="meta") for name, shape in shapes]
            for which, piece in enumerate(_pieces(self._entries[op.megatron], op.fuse(parts))):
                offsets, sizes = torch.Size(piece.global_offset), stored_sizes(piece)
                index = MetadataIndex(piece.key, offsets)
                self._source[index] = (number, which)
                items.append(
                    WriteItem(
                        index=index,
                        type=WriteItemType.SHARD,
                        tensor_data=TensorWriteData(
                            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                            properties=TensorProperties(dtype=piece.dtype),
                            size=torch.Size(piece.global_shape),
                        ),
                    )
                )
        return SavePlan(items=items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            common = io.BytesIO()
            torch.save([{"converted_from": "hugging_face"}], common)
            return common
        number, which = self._source[MetadataIndex(write_item.index.fqn, write_item.index.offset)]
        if self._last[0] != number:
            op = self._ops[number]
            whole = op.fuse([self._folder.tensor(name, shape) for name, shape in zip(op.hf, op.hf_shapes, strict=True)])
            self._last = (number, _pieces(self._entries[op.megatron], whole))
        piece = self._last[1][which]
        return piece.data.reshape(stored_sizes(piece))


def megatron_to_hf(source: Path, target: Path, *, hf_folder: Path, shard_bytes: int) -> None:
    """Write the model in the distributed checkpoint `source` as the Hugging Face folder `target`, a new folder.

    `hf_folder` gives config.json and tokenizer files. The tensors keep the dtype in which they are stored. Raises
    CheckpointError for a checkpoint that is torn or of another model, ResourceError when `target` cannot be written. A commit of
    adapters is merged with the model that they stand on.
    """
    _check_new(target)
    if (source / ADAPTER_FOLDER).is_dir():
        adapters_to_hf(source, target, hf_folder=hf_folder, shard_bytes=shard_bytes)
        return
    stored = StoredTensors(source)
    with _skeleton(hf_folder, predicts=any(key.startswith("mtp.") for key in stored.keys)) as (shape, ops, entries):
        _check_same_model(source, hf_folder, entries, stored)
        writer = HFWriter(target, shard_bytes)
        try:
            for op in ops:
                for name, tensor in zip(op.hf, op.split(_read(stored, entries[op.megatron])), strict=True):
                    for other in (name, *(copy for copy, original in shape.copies.items() if original == name)):
                        writer.add(other, tensor.clone())
            writer.add_carried(hf_folder, shape.carried)
            copy_small_files(hf_folder, target)
            writer.close()
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise


def _check_new(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not empty: name a new folder to write to.")


def _check_same_model(source: Path, hf_folder: Path, entries: dict[str, Entry], stored: StoredTensors) -> None:
    """Raise CheckpointError unless exactly these parameters are in the checkpoint."""
    problems, known = [], set()
    for entry in entries.values():
        for piece in _pieces(entry, entry.data):
            known.add(piece.key)
            if piece.key not in stored.keys:
                problems.append(f"'{piece.key}' is missing")
            elif stored.shape(piece.key) != piece.global_shape and not piece.allow_shape_mismatch:
                problems.append(f"'{piece.key}' has shape {list(stored.shape(piece.key))} instead of {list(piece.global_shape)}")
    problems += [f"'{key}' has no place in it" for key in sorted(stored.keys - known) if not key.startswith("optimizer.")]
    if problems:
        shown = "; ".join(dict.fromkeys(problems[:50]))[:500]
        raise CheckpointError(f"{source} holds another model than {hf_folder / 'config.json'} describes: {shown}.")


def _read(stored: StoredTensors, entry: Entry) -> torch.Tensor:
    """The whole Megatron parameter that `entry` describes, in the dtype in which it is stored."""
    key = _pieces(entry, entry.data)[0].key
    entry = _with_data(entry, torch.zeros(entry.data.shape, dtype=stored.dtype(key)))
    if isinstance(entry, ShardedTensor):
        stored.read([entry])
        return entry.data
    built = entry.build()
    pieces = list(built.values()) if isinstance(built, dict) else list(built)
    stored.read(pieces)
    return entry.merge_fn({name: piece.data for name, piece in built.items()} if isinstance(built, dict) else [p.data for p in pieces])
