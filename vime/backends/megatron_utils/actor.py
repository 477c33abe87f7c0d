"""`MegatronTrainer`: one rank of the trainer. Knows nothing of Ray; every public method but `__init__` is collective."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from vime.backends.megatron_utils import bootstrap
from vime.backends.megatron_utils.advantages import token_means, with_advantages
from vime.backends.megatron_utils.arguments import resolve
from vime.backends.megatron_utils.checkpoint import load_state, start_save
from vime.backends.megatron_utils.convert.registry import model_ops, trained_shape
from vime.backends.megatron_utils.convert.transfer import HFWeights, Ranks, load_hf_weights, parameters_by_name
from vime.backends.megatron_utils.convert.writer import export_hf, keep_model_files, written_by_first
from vime.backends.megatron_utils.experts import routing_metrics, routing_tape
from vime.backends.megatron_utils.frozen import freeze, trained_names
from vime.backends.megatron_utils.layout import Layout
from vime.backends.megatron_utils.lora_ops import is_adapter
from vime.backends.megatron_utils.lora_run import RunAdapters
from vime.backends.megatron_utils.loss import loss_from_logits, packed_log_probs
from vime.backends.megatron_utils.loss_policy import needs_old_log_probs, with_mean_importance
from vime.backends.megatron_utils.model import build_model, transformer_config
from vime.backends.megatron_utils.offload import Offload
from vime.backends.megatron_utils.optimizer import (
    all_moments,
    begin_moments_anew,
    build_optimizer,
    build_schedule,
    drop_moments,
    wrap_data_parallel,
)
from vime.backends.megatron_utils.record import RecordedTrainer, StepObserver, StepRecord
from vime.backends.megatron_utils.roles import HeldWeights, SentVersions
from vime.backends.megatron_utils.rollout_data import Plans, postprocessed
from vime.backends.megatron_utils.state_writer import StateWriter
from vime.backends.megatron_utils.step import ReadFunction, forward_backward, forward_each, from_last_stage, sum_metrics
from vime.backends.megatron_utils.step_report import samples_not_finite, slowest, throughput
from vime.backends.megatron_utils.trainer_hooks import TrainerHooks, load_loss_hooks, optional_hook
from vime.config.run import RunConfig
from vime.errors import ConfigError, TrainerError
from vime.packing.pack import PackedBatch, aggregation_of, pack
from vime.types import StepPlan, TrainBatch, TrainSample

__all__ = ["MegatronTrainer"]

log = logging.getLogger(__name__)
EXPORT_BUCKET_BYTES = 256 * 1024**2
ROLES = ("ref", "teacher")  # whose log-probs of the samples are taken
STORE_PREFIXES = {"old_log_probs": "", "ref_log_probs": "ref_", "teacher_log_probs": "teacher_"}  # slime's, for hooks
REFERENCE_FOLDER = "ref"  # in the trainer's part of a commit, with --ref-update-interval


class MegatronTrainer:
    """Builds model, optimizer and schedule from the configuration and the weights of `config.model.hf_checkpoint`.

    Without `with_weights` that folder need not hold any: `load` is to follow.
    Raises ConfigError, CheckpointError or ResourceError before any training is done.
    """

    adapters: RunAdapters | None = None  # with --lora-rank

    def __init__(
        self, config: RunConfig, *, rank: int, world_size: int, master_addr: str, master_port: int, with_weights: bool = True
    ) -> None:
        if config.model.hf_checkpoint is None:
            raise ConfigError("--hf-checkpoint is required: it names the folder with the model to train.")
        self._config = config
        self._shape = trained_shape(config.model.hf_checkpoint, config.training)
        per_node = config.cluster.actor_num_gpus_per_node
        self._platform = bootstrap.platform(config.cluster, local_rank=rank % per_node)
        bootstrap.set_threads(config.training, min(per_node, world_size))
        args = resolve(config, self._shape, self._platform, world_size=world_size, rank=rank)
        deadline = config.cluster.actor_deadline
        bootstrap.init_distributed(
            self._platform, rank=rank, world_size=world_size, master_addr=master_addr, master_port=master_port, deadline_s=deadline
        )
        bootstrap.init_parallel(Layout.of(args), seed=config.training.seed, deadline_s=deadline)
        self._hooks = TrainerHooks.load(config)
        self._hooks.call_init()
        self._args = args
        self._ops = model_ops(self._shape, args.padded_vocab_size)
        self._tp_group = parallel_state.get_tensor_model_parallel_group()
        self._cp_group = parallel_state.get_context_parallel_group()
        self._dp_group = parallel_state.get_data_parallel_group()
        self._model_config = transformer_config(args)
        self._tape = routing_tape(config.algorithm, self._shape)
        self._model_config.routing_tape = self._tape  # type: ignore[attr-defined]  # where the routers find it
        provider = config.model.custom_model_provider_path
        chunks = build_model(args, optional_hook(provider, "custom_model_provider_path"), str(provider))
        self._start_weights(chunks, filled=with_weights)
        self._model = wrap_data_parallel(args, self._model_config, chunks)
        self._optimizer = build_optimizer(args, self._model_config, self._model)
        self._offload = Offload(self._model, self._optimizer, self._platform.device)
        self._schedule = build_schedule(args, config.data, self._optimizer)
        self._loss_hooks = load_loss_hooks(config)
        self._own_advantages = optional_hook(config.algorithm.custom_advantage_function_path, "custom_advantage_function_path")
        self._postprocess = optional_hook(config.training.rollout_data_postprocess_path, "rollout_data_postprocess_path")
        self._step = 0
        self._saving: StateWriter | None = None
        self._source: tuple[str | None, bool] | None = (None, True)  # what was loaded, while nothing was trained since
        self._observer = StepObserver()
        self.failed_step = False  # the last step ended because loss or gradient was not finite, as all ranks know
        self.returns: list[list[torch.Tensor]] = []  # of the last step with a critic: what it is to predict, [T] a micro-batch

    # --- what others ask ---

    @property
    def data_parallel_rank(self) -> int:
        """Which TrainBatch of a step is this rank's."""
        return parallel_state.get_data_parallel_rank()

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, without vocabulary padding."""
        return sum(torch.Size(shape).numel() for op in self._ops for shape in op.hf_shapes)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._step

    # --- training ---

    def train(self, batch: TrainBatch, values: Sequence[Sequence[torch.Tensor]] | None = None) -> dict[str, float]:
        """Train on this rank's share of one rollout step; returns the same metrics on all ranks.

        `values` are the critic's, [T] of each micro-batch of each step (empty before the last pipeline stage); `returns` then are what it
        is to learn. In the first --num-critic-only-steps rollout steps nothing else is done.

        With several optimizer steps the losses are means over them and `train/step` is the last. The difference between
        trainer and engine, `train/train_rollout_logprob_abs_diff`, is always taken with the weights that generated.
        Raises TrainerError when a loss or gradient is not finite; the weights then are as before that optimizer step.
        """
        with self._watched(f"train on rollout {batch.rollout_id}"):
            self._observer = self._observe(batch)
            metrics = self._train(batch, values)
            self._observer.end(metrics)
            return metrics

    def _train(self, batch: TrainBatch, values: Sequence[Sequence[torch.Tensor]] | None) -> dict[str, float]:
        seconds: dict[str, float] = defaultdict(float)
        started = time.perf_counter()
        self._offload.take_back()
        with self._timed(seconds, "data_preprocess"):
            plans = self._packs(batch)
            if values:
                pairs = zip(plans, values, strict=True)
                plans = [[p.with_token_values(values=v) for p, v in zip(step, mine, strict=True)] for step, mine in pairs]
        self._observer.begin(plans)
        self._source = None
        for role in ROLES:
            if role in self._held or role in self._base_roles:
                with self._timed(seconds, f"{role}_log_probs"), self._as_role(role):
                    plans = self._with_log_probs(plans, f"{role}_log_probs")
        algorithm = self._config.algorithm
        old_needed = needs_old_log_probs(algorithm, num_steps=len(plans)) or self._config.model.keep_old_actor
        old_needed = old_needed or self._hooks.before_log_prob is not None  # it is there to be called
        if old_needed:
            with self._timed(seconds, "log_probs"), nullcontext() if self._tape is None else self._tape.old_policy():
                plans = self._with_old_log_probs(plans)
        means: dict[str, float] = {}
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):  # where the log-probs are, and the loss
            plans = self._with_advantages(batch, plans)
        if self._postprocess is not None:
            plans = self._postprocessed(batch, plans)
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            means = token_means(plans, self._over_data_parallel)
            if algorithm.use_tis and algorithm.tis_batch_normalize:
                plans = [with_mean_importance(step, algorithm, self._over_data_parallel) for step in plans]
        self._observer.inputs(plans)
        means = from_last_stage([means])[0]
        if values is not None:
            self.returns = [[packed.returns for packed in step if packed.returns is not None] for step in plans]
            if batch.rollout_id < self._config.critic.num_critic_only_steps:
                return means | slowest(seconds, self._platform.device)
        with self._timed(seconds, "actor_train"), nullcontext() if self._tape is None else self._tape.training():
            steps = self._optimizer_steps(plans, batch)
        interval = self._config.model.ref_update_interval
        if interval is not None and (batch.rollout_id + 1) % interval == 0:
            self._settle_parameters()
            self._held.keep("ref")
        metrics = {f"train/{name}": float(np.mean([s[name] for s in steps])) for name in steps[0]}
        if not old_needed and "train/train_rollout_logprob_abs_diff" in metrics:
            metrics["train/train_rollout_logprob_abs_diff"] = steps[0]["train_rollout_logprob_abs_diff"]
        metrics |= {"train/lr-pg_0": steps[-1]["lr-pg_0"], "train/step": float(self._step), "train/num_steps": float(len(steps))}
        seconds["train"] = time.perf_counter() - started
        speed = throughput(sum(s.length for s in batch.samples), seconds["actor_train"], self._dp_group, self._platform.device)
        return metrics | means | slowest(seconds, self._platform.device) | speed

    def packed_values(self, batch: TrainBatch, per_sample: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """What `train` takes as `values`, from the [R] of each of the batch's samples."""
        micros = [list(plan.micro_batches) for plan in batch.steps]
        pairs = zip(self._packs(batch), micros, strict=True)
        return [[p.scatter([per_sample[i] for i in micro]) for p, micro in zip(step, of, strict=True)] for step, of in pairs]

    def log_probs(self, tokens: list[int]) -> list[float]:
        """Natural-log probabilities of tokens[1:], each given what precedes it, at temperature 1. The same on all ranks."""
        if len(tokens) < 2:
            raise ValueError(f"log_probs needs at least two tokens, got {len(tokens)}.")
        plan = StepPlan(micro_batches=((0,),), num_rollouts=1, num_tokens=float(len(tokens) - 1))
        response = len(tokens) - 1
        sample = TrainSample(
            tokens=np.asarray(tokens, dtype=np.int64), response_length=response, loss_mask=np.ones(response, dtype=np.float32),
            reward=0.0, raw_reward=0.0, sample_id=0, group_id=0, rollout_id=0, rollout_mask_sum=float(response),
        )  # fmt: skip
        packed = self._to_device(pack([sample], plan, aggregation="token", multiple_of=self._multiple))

        with self._watched("log-probs of the probe"):
            found = forward_each(self._model, [packed], self._reader(temperature=1.0))
            values = [found[0][:response].tolist()] if found else [None]
            return from_last_stage(values)[0]

    # --- weights and state ---

    def sent_as(self, version: int) -> None:
        """Say that the weights of now were sent to the engines as `version`; --keep-old-actor holds a copy."""
        if self._config.model.keep_old_actor:
            self._settle_parameters()
            self._sent.keep(version)

    def hf_weights(self, bucket_bytes: int, *, prediction: bool = False) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The weights under Hugging Face names, in buckets of about `bucket_bytes`, without vocabulary padding.

        With `prediction` those of trained layers for multi-token prediction, too: an engine has no place for them in its model.
        Collective: all ranks must exhaust it. Rank 0 gets the tensors, the others as many empty lists.
        """
        with self._watched("gather the weights"):
            self._settle_parameters()
            yield from self._weights.buckets(bucket_bytes, without=None if prediction else "mtp.")

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face folder that `transformers` loads: config, tokenizer files, safetensors in shards.

        Rank 0 writes. Raises on all ranks what it meets: ResourceError when the folder cannot be written.
        """
        source = Path(str(self._config.model.hf_checkpoint))
        export_hf(source, Path(path), self._shape, self.hf_weights(EXPORT_BUCKET_BYTES, prediction=True))
        if self.adapters is not None:
            self.adapters.save(Path(path))

    def save(self, path: str) -> None:
        """Write the whole training state: model, optimizer, schedule, random states, step; the reference where it moves."""
        self._complete(self._begin_save(path, background=False))

    def start_save(self, path: str, *, background: bool = True) -> None:
        """Take the whole training state as it is now; `finish_save` comes next. In the background a thread writes a copy of it.

        At most one state is on its way: a copy is as large as model and optimizer together.
        """
        assert self._saving is None, "finish_save() comes first"
        self._saving = self._begin_save(path, background=background)

    def _begin_save(self, path: str, *, background: bool) -> StateWriter:
        with self._watched(f"save {path}"):
            self._offload.take_back()
            self._settle_parameters()
            if self._config.model.ref_update_interval is not None:
                with self._as_role("ref"):
                    self.save_hf(str(Path(path) / REFERENCE_FOLDER))
            if self.adapters is not None:
                self.adapters.save(Path(path))
            with all_moments(self._optimizer):
                parts = (self._model, self._optimizer, self._schedule)
                return start_save(path, *parts, step=self._step, background=background, adapters=self._saved_adapters)

    def wait_saved(self) -> None:
        """Until this rank's part of the state is written, or could not be. Not collective, and may be called from another thread."""
        if self._saving is not None:
            self._saving.wait()

    def finish_save(self) -> None:
        """Make the state that `start_save` took complete on disk. Raises ResourceError without space, CheckpointError otherwise."""
        assert self._saving is not None, "start_save() comes first"
        saving, self._saving = self._saving, None
        self._complete(saving)

    def _complete(self, saving: StateWriter) -> None:
        with self._watched("end the save"):
            saving.finish()
            model = Path(str(self._config.model.hf_checkpoint))
            written_by_first(lambda: keep_model_files(model, Path(saving.path)))  # `vime convert` then knows which model this is

    def load(self, path: str, *, resume: bool = True) -> None:
        """Load what `save` wrote, at this or another parallel layout, to go on with that run.

        With `resume` False take weights and optimizer moments only (with --no-load-optim no moments either): schedule, random states
        and step count begin anew.
        """
        moments = resume or not self._config.checkpoint.no_load_optim
        with self._watched(f"load {path}"):
            self._step, exact = load_state(
                path, self._model, self._optimizer, self._schedule, resume=resume, moments=moments, adapters=self._saved_adapters
            )
            if self._config.training.use_stateless_adam:
                drop_moments(self._optimizer)
            self._source = (path, resume)
            reference = Path(path) / REFERENCE_FOLDER
            if resume and self._config.model.ref_update_interval is not None and reference.is_dir():
                with self._as_role("ref"):
                    self._fill([chunk.module for chunk in self._model], str(reference))
        if not exact:
            log.warning("%s was saved at another layout: weights and optimizer are restored, random states start from the seed", path)

    def give_back(self, *, weights: bool) -> None:
        """Give device memory back until the next step or save: all but the weights, or with `weights` these, too. None on the CPU."""
        if not self._platform.is_cpu:
            self._settle_parameters()
            self._offload.give_back(weights=weights)

    def shutdown(self) -> None:
        """Leave the process groups."""
        bootstrap.shutdown()

    # --- inside ---

    def _watched(self, phase: str) -> AbstractContextManager[None]:
        return bootstrap.watch_peers(phase, f"{self._step} optimizer steps done")

    def _observe(self, batch: TrainBatch) -> StepObserver:
        """What makes a record of this step, where a flag asks for one."""
        if not StepRecord.wanted(self._config, batch.rollout_id):
            return StepObserver()
        trainer = RecordedTrainer(
            model=self._model,
            weights=self._weights,
            adapters=None if self.adapters is None else self.adapters.weights,
            temperature=self._temperature,
            vocab_size=self._shape.vocab_size,
            sequence_parallel=self._args.sequence_parallel,
            save=self.save,
            settle=self._settle_parameters,
            source=self._source,
            step=self._step,
            facts={"layout": Layout.of(self._args).facts(), "platform": self._platform.facts()},
        )
        return StepRecord(self._config, batch, trainer)

    def _settle_parameters(self) -> None:
        """With --overlap-param-gather a step's last gathers wait for the next forward pass: do them now."""
        for chunk in self._model if self._args.overlap_param_gather else []:
            chunk.disable_forward_pre_hook(param_sync=True)
            chunk.enable_forward_pre_hook()

    def _start_weights(self, chunks: Sequence[torch.nn.Module], *, filled: bool) -> None:
        """Fill the model that was just built, and hold the other roles' weights."""
        self._base_roles: set[str] = set()  # those whose weights are the policy's without its adapters
        self._held = self._hold_roles(chunks)
        if filled:
            self._fill(chunks, str(self._config.model.hf_checkpoint))
        versions = max(2, self._config.rollout.max_weight_staleness + 1)
        self._weights = HFWeights(parameters_by_name(chunks), self._ops, Ranks.here())
        if self._config.lora.lora_rank is None:
            self._sent = SentVersions(self._held, count=versions)
            self._freeze(chunks)
        else:
            self.adapters = RunAdapters(self._config, chunks, self._ops, Ranks.here(), self._weights)
            self._model_config.adapter_dropout = self._config.lora.lora_dropout  # type: ignore[attr-defined]  # where `forward_logits` looks
            self._sent = SentVersions(HeldWeights(chunks, is_adapter), count=versions)

    def _fill(self, chunks: Sequence[torch.nn.Module], folder: str) -> None:
        load_hf_weights(chunks, folder, self._ops, self._shape, ranks=Ranks.here())

    def _freeze(self, chunks: Sequence[torch.nn.Module]) -> None:
        """What --only-train-params-name-list and --freeze-params-name-list say."""
        if self._config.training.only_train_params_name_list or self._config.training.freeze_params_name_list:
            names = [op.megatron for op in self._ops]
            freeze(parameters_by_name(chunks), trained_names(names, self._config.training), tied=self._shape.tied)

    def _hold_roles(self, chunks: Sequence[torch.nn.Module]) -> HeldWeights:
        """The weights of the reference and the teacher where a flag asks for their log-probs. The model is left with any of them."""
        algorithm, paths = self._config.algorithm, self._config.model
        held, folders = HeldWeights(chunks, lambda name: not is_adapter(name)), {}
        if algorithm.use_kl_loss or algorithm.kl_coef != 0:
            folders["ref"] = ("reference", "--ref-load", paths.ref_load)
        if algorithm.use_opd and algorithm.opd_type == "megatron":
            folders["teacher"] = ("teacher", "--opd-teacher-load", paths.opd_teacher_load)
        for role, (name, flag, folder) in folders.items():
            if self._config.lora.lora_rank is not None and folder in (None, paths.hf_checkpoint) and role == "ref":
                self._base_roles.add(role)
                continue
            if folder is None:
                raise ConfigError(f"the {name}'s log-probs are needed, and {flag} is not given: it names the {name}'s Hugging Face folder.")
            shape = trained_shape(folder, self._config.training)
            if replace(shape, path=self._shape.path) != self._shape:
                raise ConfigError(
                    f"the {name} {shape.path} has another shape than {self._shape.path}; it must be of the same architecture."
                )
            self._fill(chunks, folder)
            held.keep(role)
        return held

    @contextmanager
    def _as_role(self, role: str) -> Iterator[None]:
        """The model with the weights of `role`, which has no adapters."""
        self._settle_parameters()
        with ExitStack() as stack:
            if self.adapters is not None:
                stack.enter_context(self.adapters.off())
            if role in self._held:
                stack.enter_context(self._held.using(role))
            yield

    @property
    def _saved_adapters(self) -> dict[str, Any] | None:
        """What a checkpoint says of the adapters, which then are all that it holds of the model."""
        return None if self.adapters is None else self.adapters.saved

    @property
    def _multiple(self) -> int:
        """Packs are padded to a multiple of this: sequence parallelism splits them evenly. (Context parallelism pads by itself.)"""
        alone = self._args.sequence_parallel and self._args.context_parallel_size == 1
        return parallel_state.get_tensor_model_parallel_world_size() if alone else 1

    def _to_device(self, packed: PackedBatch) -> PackedBatch:
        return packed if self._platform.is_cpu else packed.to(self._platform.device)

    def _packs(self, batch: TrainBatch) -> Plans:
        return [[self._pack(batch, plan, micro) for micro in plan.micro_batches] for plan in batch.steps]

    def _pack(self, batch: TrainBatch, plan: StepPlan, micro: Sequence[int]) -> PackedBatch:
        samples = [batch.samples[i] for i in micro]
        kind, length = aggregation_of(self._config.algorithm), self._config.rollout.rollout_max_response_len
        return self._to_device(pack(samples, plan, aggregation=kind, constant_length=length, multiple_of=self._multiple))

    def _with_advantages(self, batch: TrainBatch, plans: Plans) -> Plans:
        algorithm = self._config.algorithm
        if not algorithm.compute_advantages_and_returns or algorithm.loss_type == "sft_loss":
            return plans
        return with_advantages(
            batch, plans, algorithm, sum_over_ranks=self._over_data_parallel, function=self._own_advantages, args=self._config.args
        )

    def _postprocessed(self, batch: TrainBatch, plans: Plans) -> Plans:
        """After --rollout-data-postprocess-path, which the last pipeline stage calls; all stages learn which tokens it silenced."""
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        plans = postprocessed(batch, plans, self._postprocess, self._config.args) if last else plans
        masks = from_last_stage([[packed.loss_mask.cpu() for packed in step] if last else None for step in plans])
        pairs = zip(plans, masks, strict=True)
        return [[replace(p, loss_mask=m.to(p.loss_mask.device)) for p, m in zip(step, of, strict=True)] for step, of in pairs]

    def _over_data_parallel(self, sums: torch.Tensor) -> torch.Tensor:
        total = sums.to(self._platform.device)
        dist.all_reduce(total, group=self._dp_group)
        return total.cpu()

    def _with_log_probs(self, plans: Plans, name: str) -> Plans:
        """The log-probs of all micro-batches of all steps under the weights that are in the model, as the field `name`; in the last
        pipeline stage alone."""
        if self._hooks.before_log_prob is not None:
            self._settle_parameters()
            self._hooks.call_before_log_prob(self._model, STORE_PREFIXES[name])
        entropy = name == "old_log_probs" and self._config.algorithm.use_rollout_entropy
        names = (name, "entropies") if entropy else (name,)
        read = self._reader(temperature=self._temperature, with_entropy=entropy)
        found = forward_each(self._model, [packed for step in plans for packed in step], read)
        flat = (dict(zip(names, values.view(len(names), -1), strict=True)) for values in found)
        return [[packed.with_token_values(**next(flat)) for packed in step] for step in plans] if found else plans

    def _with_old_log_probs(self, plans: Plans) -> Plans:
        """The log-probs under the weights that generated: those in the model, unless --keep-old-actor knows better."""
        if not self._config.model.keep_old_actor:
            return self._with_log_probs(plans, "old_log_probs")

        def any_rank(flags: torch.Tensor) -> torch.Tensor:
            flags = flags.to(self._platform.device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            return flags.cpu()

        self._settle_parameters()
        return self._sent.old_log_probs(plans, lambda: self._with_log_probs(plans, "old_log_probs"), any_rank)

    @property
    def _chunk_rows(self) -> int | None:
        """--log-probs-chunk-size; None = by the memory of a piece."""
        rows = self._config.training.log_probs_chunk_size
        return rows if rows > 0 else None

    def _reader(self, *, temperature: float, with_entropy: bool = False) -> ReadFunction:
        """What makes log-probs [T] of a micro-batch's logits; log-probs and entropies [2, T] `with_entropy`."""

        def read(logits: torch.Tensor, packed: PackedBatch, rows: torch.Tensor | None) -> torch.Tensor:
            log_probs, entropies = packed_log_probs(
                logits, packed, temperature=temperature, tp_group=self._tp_group, vocab_size=self._shape.vocab_size, rows=rows,
                cp_group=self._cp_group, with_entropy=with_entropy, chunk_rows=self._chunk_rows,
            )  # fmt: skip
            return log_probs if entropies is None else torch.stack([log_probs, entropies])

        return read

    @property
    def _temperature(self) -> float:
        """Of the policy that is trained: the sampling temperature; a model that learns answers of others is taken as it is."""
        return 1.0 if self._config.algorithm.loss_type == "sft_loss" else self._config.rollout.rollout_temperature

    @property
    def _whole(self) -> bool:
        """The loss is given the logits of all positions: a user's may look at any."""
        return self._loss_hooks.custom_loss is not None

    def _loss(self, logits: torch.Tensor, packed: PackedBatch, rows: torch.Tensor | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, sums = loss_from_logits(
            logits, packed, self._config.algorithm, temperature=self._temperature, tp_group=self._tp_group,
            vocab_size=self._shape.vocab_size, rows=rows, cp_group=self._cp_group, hooks=self._loss_hooks, chunk_rows=self._chunk_rows,
        )  # fmt: skip
        if (predicted := self._model[-1].module.predicted) is None:
            return loss, sums
        return loss + self._config.training.mtp_loss_scaling_factor * predicted, sums | {"mtp_loss": predicted.detach()}

    def _optimizer_steps(self, plans: Plans, batch: TrainBatch) -> list[dict[str, float]]:
        """All optimizer steps of a rollout step; the metrics of each without prefix."""
        if self._config.training.reset_optimizer_states:
            begin_moments_anew(self._optimizer)
        steps = [self._optimizer_step(packed, batch, number) for number, packed in enumerate(plans)]
        if self._config.training.use_stateless_adam:
            drop_moments(self._optimizer)
        return steps

    def _optimizer_step(self, packed: list[PackedBatch], batch: TrainBatch, number: int) -> dict[str, float]:
        """The optimizer step `number` of a rollout step; its metrics without prefix."""
        for chunk in self._model:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        if self._hooks.before_train_step is not None:
            self._settle_parameters()
            self._hooks.call_before_train_step(batch.rollout_id, number, self._model, self._optimizer, self._schedule)
        parts = forward_backward(self._model, packed, self._loss, whole=self._whole)
        metrics = sum_metrics(parts) | routing_metrics(self._model_config, len(packed))
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        self._observer.loss(metrics, packed, parts)
        self._observer.gradient(norm)
        if self._args.check_for_nan_in_loss_and_grad:
            self._check_finite(metrics["loss"], norm, packed, parts, batch)
        rate = float(get_canonical_lr_for_logging(self._optimizer.param_groups) or 0.0)  # the one this step uses
        self._optimizer.step()
        self._observer.update(rate)
        self._schedule.step(1)
        self._step += 1
        return metrics | {"grad_norm": norm, "lr-pg_0": rate}

    def _check_finite(
        self, loss: float, norm: float, packed: list[PackedBatch], parts: list[dict[str, torch.Tensor]], batch: TrainBatch
    ) -> None:
        """Raise the same TrainerError on all ranks when loss or gradient norm is not finite, before the weights change."""
        if math.isfinite(loss) and math.isfinite(norm):
            return
        samples = samples_not_finite(loss, packed, parts)
        message = (
            f"loss {loss} and gradient norm {norm} at optimizer step {self._step} of rollout {batch.rollout_id}: not finite. "
            f"The weights are as before this step. Samples concerned: {samples}. "
            "Look at their rewards and log-probs, or lower --lr."
        )
        self._observer.end({}, failure=message)
        self.failed_step = True
        raise TrainerError(message)

    @contextmanager
    def _timed(self, seconds: dict[str, float], name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if not self._platform.is_cpu:
            torch.cuda.synchronize()
        seconds[name] += time.perf_counter() - started
