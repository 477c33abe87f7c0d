"""DistributedDataParallel, optimizer and schedule: Megatron's own, from Megatron's flags."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from vime.backends.megatron_utils.adam import use_fused_layout_adam
from vime.config.megatron_rules import planned_steps
from vime.config.sections import DataConfig
from vime.errors import ConfigError

__all__ = ["all_moments", "begin_moments_anew", "build_optimizer", "build_schedule", "drop_moments", "wrap_data_parallel"]


def wrap_data_parallel(
    args: argparse.Namespace, config: TransformerConfig, chunks: Sequence[torch.nn.Module]
) -> list[DistributedDataParallel]:
    """The model's chunks with gradient buffers that are summed over the data-parallel ranks."""
    known = {f.name for f in dataclasses.fields(DistributedDataParallelConfig)}
    values = {name: value for name, value in vars(args).items() if name in known}
    values |= {
        "grad_reduce_in_fp32": args.accumulate_allreduce_grads_in_fp32,
        "check_for_nan_in_grad": False,  # the trainer checks loss and gradient norm itself, and names the samples
        "num_buckets": args.ddp_num_buckets,
        "bucket_size": args.ddp_bucket_size,
        "average_in_collective": False,
    }
    ddp = DistributedDataParallelConfig(**values)
    # As in Megatron's own training: only the first chunk's buckets are small enough to overlap with its backward pass.
    wrapped = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)]
    config.finalize_model_grads_func = _sum_gradients
    if args.overlap_grad_reduce:
        config.no_sync_func = wrapped[0].no_sync if len(wrapped) == 1 else [chunk.no_sync for chunk in wrapped]
    return wrapped


def _sum_gradients(model: list[torch.nn.Module], num_tokens: Any = None, **groups: Any) -> None:
    """Megatron's reduction of gradients, without its division by a number of tokens: the loss is weighted already."""
    finalize_model_grads(model, None, **groups)


def build_optimizer(args: argparse.Namespace, config: TransformerConfig, chunks: Sequence[DistributedDataParallel]) -> MegatronOptimizer:
    """Megatron's optimizer (distributed over the data-parallel ranks unless told otherwise)."""
    use_fused_layout_adam()
    known = {f.name for f in dataclasses.fields(OptimizerConfig)}
    optimizer_config = OptimizerConfig(**{name: value for name, value in vars(args).items() if name in known})
    optimizer = get_megatron_optimizer(optimizer_config, list(chunks), get_standard_config_overrides(config=optimizer_config))
    config.grad_scale_func = None
    return optimizer


def _adams(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The optimizers with the moments, below Megatron's."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts if part.optimizer is not None]


def begin_moments_anew(optimizer: MegatronOptimizer) -> None:
    """Set moments and step counts to 0, as at the start of a run."""
    for adam in _adams(optimizer):
        for group in adam.param_groups:
            group["step"] = 0
        for moments in adam.state.values():
            for value in moments.values():
                value.zero_()


def drop_moments(optimizer: MegatronOptimizer) -> None:
    """Give the moments' memory back; the next step begins with zeros and a step count of 0."""
    for adam in _adams(optimizer):
        for group in adam.param_groups:
            group["step"] = 0
        adam.state.clear()


@contextmanager
def all_moments(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Moments that are not there are there inside, as zeros: Megatron's checkpoints hold them for each parameter."""
    lacking = [(adam, p) for adam in _adams(optimizer) for group in adam.param_groups for p in group["params"] if not adam.state.get(p)]
    for adam, parameter in lacking:
        adam.state[parameter].update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
    try:
        yield
    finally:
        for adam, parameter in lacking:
            del adam.state[parameter]


def build_schedule(args: argparse.Namespace, data: DataConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Learning rate and weight decay by optimizer step, from Megatron's --lr-* flags.

    What decays does so over --lr-decay-iters, else --train-iters, else the optimizer steps that --num-rollout implies. Resuming, the
    flags' settings prevail over the saved ones unless --use-checkpoint-opt-param-scheduler says otherwise.
    """
    total = args.train_iters or planned_steps(data)
    decay = args.lr_decay_iters or total
    if decay is None:
        if args.lr_decay_style != "constant" or args.lr_warmup_fraction is not None:
            raise ConfigError(
                f"--lr-decay-style {args.lr_decay_style} needs to know over how many steps: give --num-rollout or --lr-decay-iters, "
                "or say --lr-decay-style constant."
            )
        decay = max(args.lr_warmup_iters + 1, 1)
    decay = decay or args.lr_warmup_iters + 1  # --num-rollout 0 evaluates and takes no step
    warmup = args.lr_warmup_fraction * decay if args.lr_warmup_fraction is not None else args.lr_warmup_iters
    if warmup >= decay:
        raise ConfigError(f"--lr-warmup-iters {warmup:g} leaves no step of the {decay} over which the learning rate runs.")
    build = partial(
        OptimizerParamScheduler,
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=max(total or decay, 1),
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler or not args.use_checkpoint_opt_param_scheduler,
        wsd_decay_steps=args.lr_wsd_decay_iters,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
    try:
        return build()
    except AssertionError as error:
        raise ConfigError(f"Megatron refuses the learning-rate schedule ({error or 'see --lr, --min-lr, --lr-warmup-init'}).") from error
