"""What a trainer tells of a step while it trains on it, and the record that is made of that: a step capsule, a debug dump, or both.

    begin ─▶ inputs ─▶ (loss ─▶ gradient ─▶ update) an optimizer step ─▶ end

All methods are collective. Recording takes one more forward pass without gradients, which leaves weights, random states and what is
trained untouched; a capsule gathers the weights before and after and the gradients once each, to digest them on rank 0.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
import xxhash
from megatron.core import parallel_state, tensor_parallel

from vime.backends.megatron_utils.convert.transfer import HFWeights
from vime.backends.megatron_utils.loss import at_rows, packed_log_probs
from vime.backends.megatron_utils.measures import (
    chosen_experts,
    gather_gradients,
    logit_moments,
    main_grad,
    positions_here,
    routes_of,
)
from vime.backends.megatron_utils.rollout_data import sample_columns
from vime.backends.megatron_utils.step import forward_each
from vime.capsule.folder import CONFIG, STATE, finish_capsule, partial_path
from vime.capsule.results import Item, ParameterRows, SampleRows, in_order, items_of_samples, save_items
from vime.config.run import RunConfig
from vime.config.sections import EvalConfig
from vime.config.show import shown
from vime.errors import CheckpointError, DataError, ResourceError
from vime.packing.pack import PackedBatch
from vime.types import FILLER_ID, TrainBatch

__all__ = ["RecordedTrainer", "StepObserver", "StepRecord"]

log = logging.getLogger(__name__)
Plans = Sequence[Sequence[PackedBatch]]
BUCKET_BYTES = 256 * 1024**2
Choice = tuple[int, int, int, torch.Tensor, torch.Tensor]  # data-parallel rank, sample's place, layer, positions [n], experts [n, k]
OF_PACKS = {  # (stage, what it is) -> the field of PackedBatch
    ("pack", "loss mask"): "loss_mask",
    ("pack", "weight in the mean"): "loss_weight",
    ("pack", "weight versions"): "weight_versions",
    ("log-prob", "engine's log-probs"): "rollout_log_probs",
    ("log-prob", "teacher's log-probs"): "teacher_log_probs",
    ("log-prob", "reference's log-probs"): "ref_log_probs",
    ("log-prob", "old log-probs"): "old_log_probs",
    ("advantage", "values"): "values",
    ("advantage", "advantages"): "advantages",
    ("advantage", "returns"): "returns",
}
OLD, POLICY = ("log-prob", "old log-probs"), ("log-prob", "policy's log-probs")
ROUTING = ("forward", "routing")
EXACT = {  # what no layout changes
    ("tokenize", "tokens"), ("pack", "loss mask"), ("pack", "weight in the mean"), ("pack", "weight versions"), ("pack", "kept tokens"),
    ("log-prob", "engine's log-probs"), ("advantage", "values"), ("advantage", "reward"), ("advantage", "normalised reward"),
}  # fmt: skip
PLACE = ("pack", "optimizer step, data-parallel rank, micro-batch")
DUMPED = {  # our name -> slime's in its rollout_data
    ("log-prob", "engine's log-probs"): "rollout_log_probs",
    ("log-prob", "teacher's log-probs"): "teacher_log_probs",
    ("log-prob", "reference's log-probs"): "ref_log_probs",
    ("advantage", "values"): "values",
    ("advantage", "advantages"): "advantages",
    ("advantage", "returns"): "returns",
    ("pack", "weight in the mean"): "loss_weights",
    ("pack", "weight versions"): "weight_versions",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTrainer:
    """What a record needs of its trainer."""

    model: Sequence[Any]  # the chunks, wrapped in DistributedDataParallel
    weights: HFWeights  # with the adapters in them
    adapters: HFWeights | None
    temperature: float
    vocab_size: int
    sequence_parallel: bool
    save: Callable[[str], None]
    settle: Callable[[], None]  # gathers parameters that are still on their way
    source: tuple[str | None, bool] | None  # (what `load` was given, its `resume`) where nothing was trained since; None otherwise
    step: int  # optimizer steps done
    facts: dict[str, Any]  # layout and platform


class StepObserver:
    """Is told what a step computes. This one makes nothing of it."""

    def begin(self, plans: Plans) -> None:
        """The packs are made; nothing was computed yet."""

    def inputs(self, plans: Plans) -> None:
        """The packs have log-probs and advantages, in the last pipeline stage."""

    def loss(self, metrics: dict[str, float], packed: Sequence[PackedBatch], parts: Sequence[dict[str, torch.Tensor]]) -> None:
        """One optimizer step's gradient is summed up; `metrics` are the same on all ranks, `parts` as `forward_backward` gives them."""

    def gradient(self, norm: float) -> None:
        """The optimizer has not changed the weights yet."""

    def update(self, rate: float) -> None:
        """It has."""

    def end(self, metrics: dict[str, float], failure: str | None = None) -> None:
        """The step is done, or failed."""


class StepRecord(StepObserver):
    """Records one rollout step: as a capsule with --capsule-steps, as a file with --save-debug-train-data or --dump-details.

    A capsule that cannot be written is given up with a warning: training goes on. Raises ResourceError when a dump cannot be written.
    """

    def __init__(self, config: RunConfig, batch: TrainBatch, trainer: RecordedTrainer) -> None:
        self._config, self._batch, self._trainer = config, batch, trainer
        self._capsule = batch.rollout_id in config.debug.capsule_steps
        self._step = 0  # optimizer step within the rollout step
        self._items: list[Item] = []
        self._losses: list[tuple[str, int, int, int, float]] = []  # of this rank's micro-batches
        self._state: dict[str, Any] = {}
        rank = parallel_state.get_data_parallel_rank()
        self._samples = [SampleRows(sample=sample, origin=(rank, i)) for i, sample in enumerate(batch.samples)]
        self._routing: list[Choice] = []

    @staticmethod
    def wanted(config: RunConfig, rollout_id: int) -> bool:
        """Whether a flag asks for a record of this step."""
        return config.train_dump is not None or rollout_id in config.debug.capsule_steps

    # --- what the trainer tells ---

    def begin(self, plans: Plans) -> None:
        """Keep the state before the step, and look at what the model makes of its samples."""
        if self._capsule:
            self._trainer.settle()
            self._keep_state()
            self._random_states()
            self._parameters("forward", "weights", exact=True)
        batches = [packed for step in plans for packed in step]
        with routes_of(self._trainer.model if self._capsule else ()) as routes:  # a dump has no place for them
            found = forward_each(self._trainer.model, batches, self._read)
        self._keep_routing(routes, batches)
        for (rows, packed), values in zip(self._packs(plans), found, strict=False):
            for key, of_all in (
                (("forward", "mean of the logits"), values[1]),
                (("forward", "root mean square of the logits"), values[2]),
                (POLICY, values[0].float()),
            ):
                _put(rows, key, packed.gather(of_all))

    def inputs(self, plans: Plans) -> None:
        """Take what the packs hold."""
        for row in self._samples:
            sample = row.sample
            row.rows["tokenize", "tokens"] = torch.tensor(sample.tokens)
            row.rows["advantage", "reward"] = torch.tensor([sample.raw_reward], dtype=torch.float64)
            row.rows["advantage", "normalised reward"] = torch.tensor([sample.reward], dtype=torch.float64)
            kept = [values for values in (sample.kept_offsets, sample.kept_ids) if values is not None]
            row.rows["pack", "kept tokens"] = torch.tensor(np.concatenate(kept) if kept else [], dtype=torch.int64)
        for key, name in OF_PACKS.items():
            for rows, packed in self._packs(plans):
                if (values := getattr(packed, name)) is not None:
                    _put(rows, key, packed.gather(values))
        rank, denominators = parallel_state.get_data_parallel_rank(), dict[str, float]()
        for step, plan in enumerate(self._batch.steps):
            for number, micro in enumerate(plan.micro_batches):
                for i in micro:
                    self._samples[i].rows[PLACE] = torch.tensor([step, rank, number])
            counts = {"rollouts": plan.num_rollouts, "trained tokens": plan.num_tokens, "samples": plan.num_sequences}
            denominators |= {f"{name} of optimizer step {step}": float(count) for name, count in counts.items()}
        self._numbers("pack", "denominators", denominators, exact=True)

    def loss(self, metrics: dict[str, float], packed: Sequence[PackedBatch], parts: Sequence[dict[str, torch.Tensor]]) -> None:
        """Keep the step's metrics, and what each micro-batch adds to the loss."""
        if not self._capsule:
            return
        self._numbers("loss", "metrics", metrics, step=self._step)
        rank = parallel_state.get_data_parallel_rank()
        for number, (micro, part) in enumerate(zip(packed, parts, strict=False)):
            ids = ", ".join(map(str, micro.sample_ids[:8])) + (", ..." if len(micro.sample_ids) > 8 else "")
            self._losses.append((f"the micro-batch with samples {ids}", self._step, rank, number, float(part["loss"])))

    def gradient(self, norm: float) -> None:
        """Digest the gradients, whole."""
        if self._capsule:
            gather_gradients(self._trainer.model)
            self._parameters("gradient", "gradients", step=self._step, read=main_grad)
            self._numbers("gradient", "norm", {"the whole model": norm}, step=self._step)

    def update(self, rate: float) -> None:
        """Digest the new weights."""
        if self._capsule:
            self._trainer.settle()
            self._numbers("update", "learning rate", {"all": rate}, step=self._step)
            self._parameters("update", "weights", step=self._step)
        self._step += 1

    def end(self, metrics: dict[str, float], failure: str | None = None) -> None:
        """Write what was asked for."""
        speaks = _holds_results()
        mine = (self._samples if speaks else [], self._routing, self._losses if speaks else [])
        found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, found)
        if found is None:
            return
        samples = in_order(row for rows, _, _ in found for row in rows if row.sample.sample_id != FILLER_ID)
        _put_routing(samples, [choice for _, routing, _ in found for choice in routing])
        if self._config.train_dump is not None:
            self._dump(samples, metrics)
        if self._capsule and self._state:
            self._losses = sorted((loss for _, _, losses in found for loss in losses), key=lambda loss: loss[1:4])
            self._write(samples, failure)

    # --- how it is kept ---

    def _packs(self, plans: Plans) -> Iterator[tuple[list[SampleRows], PackedBatch]]:
        """Each pack with the rows of its samples."""
        for step, plan in zip(plans, self._batch.steps, strict=True):
            for packed, micro in zip(step, plan.micro_batches, strict=True):
                yield [self._samples[i] for i in micro], packed

    def _numbers(self, stage: str, name: str, values: dict[str, float], *, step: int | None = None, exact: bool = False) -> None:
        rows = tuple(torch.tensor([value], dtype=torch.float64) for value in values.values())
        self._items.append(Item(stage=stage, name=name, step=step, labels=tuple(values), rows=rows, exact=exact))

    def _parameters(self, stage: str, name: str, *, step: int | None = None, exact: bool = False, read: Any = None) -> None:
        """Digest the weights, or what `read` makes of those that are trained."""
        rows, adapters = ParameterRows(), self._trainer.adapters
        sources = [self._trainer.weights] if read is None or adapters is None else []
        for source in (*sources, *([] if adapters is None else [adapters])):
            for bucket in source.buckets(BUCKET_BYTES, read):
                for parameter, tensor in bucket:
                    rows.add(parameter, tensor)
        self._items.append(rows.item(stage, name, step=step, exact=exact))

    def _random_states(self) -> None:
        """A digest of each rank's generators, which dropout draws from."""
        states = [torch.get_rng_state(), *(state.cpu() for _, state in sorted(tensor_parallel.get_cuda_rng_tracker().get_states().items()))]
        mine = torch.tensor(list(xxhash.xxh3_128_digest(torch.cat(states).numpy().tobytes())))
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        labels = tuple(f"rank {rank}" for rank in range(len(found)))
        self._items.append(Item(stage="forward", name="random states", labels=labels, rows=tuple(found), of_layout=True))

    def _keep_state(self) -> None:
        """What the step starts from: named where something else holds it (--capsule-state referenced), else stored."""
        trainer, partial = self._trainer, partial_path(str(self._config.capsule_folder), self._batch.rollout_id)
        if self._config.debug.capsule_state == "referenced" and (known := self._known_state()) is not None:
            self._state = known
            return
        folder = partial / STATE
        failure = _agreed(lambda: folder.mkdir(parents=True, exist_ok=True)) or _agreed(lambda: trainer.save(str(folder)))
        if failure is not None:
            log.warning("no capsule of rollout step %d: %s", self._batch.rollout_id, failure)
            shutil.rmtree(partial, ignore_errors=True)
            self._capsule = False
            return
        self._state = {"path": STATE, "resume": True}

    def _known_state(self) -> dict[str, Any] | None:
        """Where the state before this step is on disk; the same on all ranks."""
        found: list[dict[str, Any] | None] = [None]
        if dist.get_rank() == 0:
            save = self._config.checkpoint.save
            commit = None if save is None else Path(save) / f"iter_{self._batch.rollout_id - 1:07d}"
            if self._trainer.source is not None:
                path, resume = self._trainer.source
                found = [{"path": path, "resume": resume}]
            elif commit is not None and (commit / "commit.json").is_file():
                found = [{"path": str(commit / "trainer"), "resume": True}]
        dist.broadcast_object_list(found)
        return found[0]

    def _read(self, logits: torch.Tensor, packed: PackedBatch, rows: torch.Tensor | None) -> torch.Tensor:
        """[3, T] f64: log-prob, mean and root mean square of the logits of each trained position."""
        assert rows is not None  # `forward_each` asks for the trained positions
        trainer, cp_group = self._trainer, parallel_state.get_context_parallel_group()
        tp_group = parallel_state.get_tensor_model_parallel_group()
        log_probs, _ = packed_log_probs(
            logits, packed, temperature=trainer.temperature, tp_group=tp_group, vocab_size=trainer.vocab_size, rows=rows, cp_group=cp_group
        )
        mean, square = (at_rows(value, packed, rows, cp_group) for value in logit_moments(logits, tp_group, trainer.vocab_size))
        return torch.stack([log_probs.double(), mean, square.sqrt()]).cpu()

    def _keep_routing(self, routes: dict[int, list[torch.Tensor]], batches: Sequence[PackedBatch]) -> None:
        """This rank's share of the experts' choices."""
        if not routes or (parallel_state.get_tensor_model_parallel_rank() and not self._trainer.sequence_parallel):
            return
        rank = parallel_state.get_data_parallel_rank()
        micros = [micro for plan in self._batch.steps for micro in plan.micro_batches]
        for number, (packed, micro) in enumerate(zip(batches, micros, strict=True)):
            places = positions_here(packed, sequence_parallel=self._trainer.sequence_parallel)
            owner = F.pad(packed.sequence_ids, (0, 1), value=-1)[places]
            position = F.pad(packed.position_ids, (0, 1))[places]
            for layer, maps in routes.items():
                chosen = chosen_experts(maps[number])
                for at, i in enumerate(micro):
                    mine = owner == at
                    self._routing.append((rank, i, layer, position[mine].cpu(), chosen[mine].cpu()))

    def _dump(self, samples: Sequence[SampleRows], metrics: dict[str, float]) -> None:
        """The file of --save-debug-train-data: slime's names, one list entry a sample; read it with torch.load(weights_only=True)."""
        path = Path(str(self._config.train_dump).format(rollout_id=self._batch.rollout_id))
        plain = [one.sample for one in samples]
        data: dict[str, list[Any]] = sample_columns(plain) | {
            "optimizer_steps": [int(one.rows[PLACE][0]) for one in samples],
        }
        old = OLD if all(OLD in one.rows for one in samples) else POLICY
        for key, name in ((old, "log_probs"), *DUMPED.items()):
            if samples and all(key in one.rows for one in samples):
                data[name] = [one.rows[key] for one in samples]
        if any(s.kept_ids is not None for s in plain):
            data["rollout_top_p_token_ids"] = [None if s.kept_ids is None else torch.tensor(s.kept_ids) for s in plain]
            data["rollout_top_p_token_offsets"] = [None if s.kept_offsets is None else torch.tensor(s.kept_offsets) for s in plain]
        partial = path.with_name(path.name + ".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"rollout_id": self._batch.rollout_id, "rollout_data": data, "metrics": dict(metrics)}, partial)
            os.replace(partial, path)
        except (OSError, RuntimeError) as error:  # torch tells a full disk as a RuntimeError
            partial.unlink(missing_ok=True)
            raise ResourceError(
                f"the training data of step {self._batch.rollout_id} cannot be written to {path} ({error}). Free space, or name another "
                "place with --save-debug-train-data or --dump-details."
            ) from error

    def _write(self, samples: Sequence[SampleRows], failure: str | None) -> None:
        """Finish the capsule."""
        labels, steps, values = [], [], []
        for label, step, _, _, value in self._losses:
            labels.append(label)
            steps.append(step)
            values.append(torch.tensor([value], dtype=torch.float64))
        for step in sorted(set(steps)):
            mine = [i for i, of in enumerate(steps) if of == step]
            self._items.append(
                Item(
                    stage="loss", name="share of the loss", step=step, labels=tuple(labels[i] for i in mine),
                    rows=tuple(values[i] for i in mine), of_layout=True,
                )
            )  # fmt: skip
        folder, rollout_id = str(self._config.capsule_folder), self._batch.rollout_id
        partial = partial_path(folder, rollout_id)
        versions = [v for one in samples if one.sample.weight_versions is not None for v in one.sample.weight_versions.tolist() if v >= 0]
        facts = {
            "optimizer_steps": self._trainer.step,
            "weight_versions": [int(min(versions)), int(max(versions))] if versions else None,
            "state": self._state,
            "num_rollout": self._config.data.num_rollout,
            "prompt_data": self._config.data.prompt_data is not None,
            "vllm_tokens": self._config.vllm_tokens,
            "router_tokens": self._config.router_tokens,
            "adapters": self._trainer.adapters is not None,
            "failure": failure,
            **self._trainer.facts,
        }
        try:
            partial.mkdir(parents=True, exist_ok=True)
            (partial / CONFIG).write_text(shown(_of_training(self._config)))
            before = [item for item in self._items if item.stage == "forward"]  # the weights: what all else follows from comes first
            after = [item for item in self._items if item.stage != "forward"]
            save_items(partial, [*before, *items_of_samples(samples, EXACT, {PLACE}), *after])
            path = finish_capsule(folder, rollout_id, facts)
        except (OSError, DataError) as error:
            log.warning("no capsule of rollout step %d: %s", rollout_id, error)
            shutil.rmtree(partial, ignore_errors=True)
        else:
            log.info("capsule of rollout step %d: %s", rollout_id, path)


def _agreed(write: Callable[[], None]) -> str | None:
    """What kept any rank from writing, the same on all of them; None when nothing did. Collective."""
    failure = None
    try:
        write()
    except (ResourceError, CheckpointError, OSError) as error:
        failure = str(error)
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, failure)
    return next((one for one in found if one is not None), None)


def _of_training(config: RunConfig) -> RunConfig:
    """The run without its engines' own flags and its evaluation, which the step does not depend on: they may be gone by the replay."""
    evaluation = {f.name for f in fields(EvalConfig)}
    sources = {name: source for name, source in config.sources.items() if name not in evaluation}
    return replace(config, eval=EvalConfig(), vllm_tokens=(), router_tokens=(), sources=sources)


def _put(rows: Sequence[SampleRows], key: tuple[str, str], values: Sequence[torch.Tensor]) -> None:
    for row, value in zip(rows, values, strict=True):
        row.rows[key] = value.detach().cpu().clone()


def _put_routing(samples: Sequence[SampleRows], found: Sequence[Choice]) -> None:
    """[T, layers, k] of each sample, from the shares of all ranks."""
    layers = sorted({layer for _, _, layer, _, _ in found})
    if not layers:
        return
    width = max(chosen.shape[-1] for *_, chosen in found)
    of_sample = {one.origin: torch.full((one.sample.length, len(layers), width), -1, dtype=torch.int16) for one in samples}
    for rank, i, layer, positions, chosen in found:
        if (rank, i) in of_sample:
            of_sample[rank, i][positions, layers.index(layer), : chosen.shape[-1]] = chosen
    for one in samples:
        one.rows[ROUTING] = of_sample[one.origin]


def _holds_results() -> bool:
    """This rank is the one of its data-parallel share that gives the results: the last pipeline stage has them, and all its ranks alike."""
    first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
    return first and parallel_state.is_pipeline_last_stage(ignore_virtual=True)
