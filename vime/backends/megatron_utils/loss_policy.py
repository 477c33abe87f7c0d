"""The policy loss of one micro-batch, from its log-probs: surrogate, corrections, entropy bonus, KL to the reference.

surrogate  by the estimator (`algorithms.policy_losses`)     per token
  x        importance weights, rejection (`importance.py`), off-policy mask (`opsm.py`), or the user's function
  mean     as --loss-aggregation or the user's reducer says
  -        entropy_coef x entropy
  +        kl_loss_coef x KL (`kl.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vime.algorithms import kl
from vime.algorithms.importance import importance_weights, kept_tokens
from vime.algorithms.opsm import off_policy_mask
from vime.algorithms.registry import ADVANTAGES, KL_ESTIMATORS
from vime.algorithms.sequences import Sequences
from vime.config.sections import AlgorithmConfig
from vime.errors import DataError, HookError
from vime.hooks import hook_errors
from vime.packing.pack import PackedBatch

__all__ = ["LossHooks", "Metrics", "mean", "needs_old_log_probs", "policy_loss", "required", "with_mean_importance"]

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHooks:
    """The user's functions inside the loss, loaded; None = not given. `args` is the flat view that they are handed.

    With `recompute` the custom loss keeps nothing for its backward pass and is computed once more there.
    """

    args: Any = None
    custom_loss: Callable[..., Any] | None = None
    custom_tis: Callable[..., Any] | None = None
    pg_loss_reducer: Callable[..., Any] | None = None
    recompute: bool = False


def mean(packed: PackedBatch, values: torch.Tensor) -> torch.Tensor:
    """This micro-batch's share of the step's mean of `values` [T]."""
    return (packed.loss_weight * values).sum()


def required(packed: PackedBatch, name: str, why: str) -> torch.Tensor:
    """A field of `packed` that must be there. Raises DataError."""
    value = getattr(packed, name)
    if value is None:
        raise DataError(f"the micro-batch has no {name}, which {why} needs (samples {list(packed.sample_ids)[:4]}...).")
    return value


def _sequences(packed: PackedBatch) -> Sequences:
    return Sequences(ids=packed.sequence_ids, mask=packed.loss_mask, count=len(packed.lengths))


def policy_loss(
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    packed: PackedBatch,
    algorithm: AlgorithmConfig,
    hooks: LossHooks,
) -> tuple[torch.Tensor, Metrics]:
    """(loss, metric sums) of [T] log-probs and entropies in nats; the metrics still hang on the graph."""
    sequences = _sequences(packed)
    advantages = required(packed, "advantages", "--loss-type policy_loss")
    current = log_probs.detach()
    trainers = current if packed.old_log_probs is None else packed.old_log_probs
    old = required(packed, "rollout_log_probs", "--use-rollout-logprobs") if algorithm.use_rollout_logprobs else trainers
    per_token, clipped, log_ratio = ADVANTAGES[algorithm.advantage_estimator].policy_loss(log_probs, old, advantages, sequences, algorithm)
    metrics: Metrics = {"entropy_loss": mean(packed, entropy), "pg_clipfrac": mean(packed, clipped)}
    metrics["ppo_kl"] = mean(packed, -log_ratio)
    if algorithm.use_opsm:
        behaviour = required(packed, "rollout_log_probs", "--use-opsm")
        kept = off_policy_mask(log_probs, behaviour, advantages, sequences, delta=algorithm.opsm_delta)
        per_token = per_token * kept
        metrics["opsm_clipfrac"] = mean(packed, 1 - kept)
    per_token, more = _corrected(per_token, trainers, packed, algorithm, hooks, sequences)
    metrics |= more
    pg_loss = mean(packed, per_token) if hooks.pg_loss_reducer is None else _reduced(per_token, packed, algorithm, hooks)
    loss, metrics = pg_loss, {"pg_loss": pg_loss, **metrics}
    if algorithm.entropy_coef != 0:
        loss = loss - algorithm.entropy_coef * metrics["entropy_loss"]
    if algorithm.use_kl_loss:
        reference = required(packed, "ref_log_probs", "--use-kl-loss")
        estimate = KL_ESTIMATORS[algorithm.kl_loss_type](log_probs, reference)
        if algorithm.use_unbiased_kl:
            estimate = kl.unbiased(estimate, log_probs, old)
        metrics["kl_loss"] = mean(packed, estimate)
        loss = loss + algorithm.kl_loss_coef * metrics["kl_loss"]
    if packed.rollout_log_probs is not None:
        compared = current if algorithm.use_rollout_logprobs else trainers
        metrics["train_rollout_logprob_abs_diff"] = mean(packed, (compared - packed.rollout_log_probs).abs())
    return loss, metrics


def _corrected(
    per_token: torch.Tensor,
    trainers: torch.Tensor,
    packed: PackedBatch,
    algorithm: AlgorithmConfig,
    hooks: LossHooks,
    sequences: Sequences,
) -> tuple[torch.Tensor, Metrics]:
    """The surrogate weighted by trainer / engine, and metrics of the weights. `trainers` are the log-probs before the first update."""
    if not (algorithm.use_tis or algorithm.use_rs or algorithm.get_mismatch_metrics):
        return per_token, {}
    log_ratio = trainers - required(packed, "rollout_log_probs", "a correction for the engine's log-probs")
    metrics: Metrics = {}
    if algorithm.get_mismatch_metrics:
        metrics |= _mismatch(log_ratio, packed, sequences)
    if algorithm.use_tis and hooks.custom_tis is not None:
        per_token, more = _user_corrected(per_token, trainers, packed, hooks)
        metrics |= more
    elif algorithm.use_tis:
        weights, outside = _weights(log_ratio, algorithm, sequences)
        weights = weights / packed.mean_importance
        per_token = per_token * weights
        metrics |= {"tis": mean(packed, weights), "tis_clipfrac": mean(packed, outside), "tis_abs": mean(packed, (weights - 1).abs())}
    if algorithm.use_rs:
        low, high = algorithm.rs_lower_bound, algorithm.rs_upper_bound
        kept = kept_tokens(
            log_ratio,
            sequences,
            level=algorithm.rs_level,
            low=algorithm.tis_clip_low if low is None else low,
            high=algorithm.tis_clip if high is None else high,
            veto=algorithm.rs_veto_threshold,
        )
        per_token = per_token * kept
        metrics["rs_rejected_frac"] = mean(packed, 1 - kept)
    return per_token, metrics


def _weights(log_ratio: torch.Tensor, algorithm: AlgorithmConfig, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
    """--use-tis as the flags say: (weights [T], 1 where they are bounded [T])."""
    truncates = algorithm.tis_mode == "truncate"
    return importance_weights(
        log_ratio,
        sequences,
        level=algorithm.tis_level,
        mode="clip" if truncates else algorithm.tis_mode,
        low=0.0 if truncates else algorithm.tis_clip_low,
        high=algorithm.tis_clip,
    )


def with_mean_importance(
    step: Sequence[PackedBatch], algorithm: AlgorithmConfig, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]
) -> list[PackedBatch]:
    """--tis-batch-normalize: the micro-batches of one optimizer step with the mean weight of all its trained tokens, to divide by.

    They must have `old_log_probs`. `sum_over_ranks` adds a [2] float64 tensor up over the data-parallel ranks.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    for packed in step:
        old, engine = required(packed, "old_log_probs", "--tis-batch-normalize"), required(packed, "rollout_log_probs", "--use-tis")
        weights, _ = _weights(old - engine, algorithm, _sequences(packed))
        sums += torch.stack([(weights * packed.loss_mask).sum(), packed.loss_mask.sum()]).double().cpu()
    total, count = sum_over_ranks(sums).tolist()
    return [replace(packed, mean_importance=total / count if total > 0 else 1.0) for packed in step]


def _mismatch(log_ratio: torch.Tensor, packed: PackedBatch, sequences: Sequences) -> Metrics:
    """How far the trainer is from the engine, log_ratio = log pi_trainer - log pi_engine on the engine's samples."""
    ratio = torch.exp(log_ratio)
    return {
        "ois": mean(packed, ratio),
        "mismatch_kl": mean(packed, -log_ratio),  # k1 of KL(engine || trainer)
        "mismatch_k3_kl": mean(packed, torch.expm1(log_ratio) - log_ratio),
        "mismatch_chi2": mean(packed, ratio.square() - 1),
        "mismatch_seq_log_ratio_abs": mean(packed, sequences.spread(sequences.means(log_ratio)).abs()),
    }


def _user_corrected(per_token: torch.Tensor, trainers: torch.Tensor, packed: PackedBatch, hooks: LossHooks) -> tuple[torch.Tensor, Metrics]:
    """--custom-tis-function-path with slime's arguments; the masks that it returns silence tokens, denominators stay."""
    assert hooks.custom_tis is not None
    assert packed.rollout_log_probs is not None
    path = getattr(hooks.args, "custom_tis_function_path", "")
    with hook_errors("--custom-tis-function-path", str(path), hooks.custom_tis):
        pg_loss, masks, metrics = hooks.custom_tis(
            args=hooks.args,
            pg_loss=torch.cat(packed.gather(per_token)),
            train_log_probs=packed.gather(trainers),
            rollout_log_probs=packed.gather(packed.rollout_log_probs),
            loss_masks=packed.gather(packed.loss_mask),
            total_lengths=list(packed.lengths),
            response_lengths=list(packed.response_lengths),
        )
        kept = torch.cat(list(masks)).to(pg_loss)
        weighted = packed.scatter(list((pg_loss * kept).split(packed.response_lengths)))
        parts = {name: packed.scatter(list(torch.as_tensor(v).split(packed.response_lengths))) for name, v in metrics.items()}
    return weighted, {name: mean(packed, values) for name, values in parts.items()}


def _reduced(per_token: torch.Tensor, packed: PackedBatch, algorithm: AlgorithmConfig, hooks: LossHooks) -> torch.Tensor:
    """--custom-pg-loss-reducer-function-path: its sum over this micro-batch, divided by the step's rollouts (per token: tokens)."""
    assert hooks.pg_loss_reducer is not None
    path = getattr(hooks.args, "custom_pg_loss_reducer_function_path", "")
    with hook_errors("--custom-pg-loss-reducer-function-path", str(path), hooks.pg_loss_reducer):
        reduce = hooks.pg_loss_reducer(
            list(packed.lengths), list(packed.response_lengths), packed.gather(packed.loss_mask), algorithm.calculate_per_token_loss
        )
        value = reduce(torch.cat(packed.gather(per_token)))
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise HookError(
            f"--custom-pg-loss-reducer-function-path: its callable gave {type(value).__name__}; expected a tensor with one element."
        )
    return value.reshape(()) / packed.denominator if packed.denominator > 0 else value.reshape(()) * 0.0


def needs_old_log_probs(algorithm: AlgorithmConfig, *, num_steps: int) -> bool:
    """Whether the log-probs under the weights that generated must be computed before the first optimizer step.

    Advantages start from them with --kl-coef and --use-opd; --use-routing-replay records routing in that pass and --tis-batch-normalize
    looks at all of them beforehand. The loss compares with them from the second optimizer step on; in the first they are its own.
    """
    if algorithm.loss_type == "sft_loss":
        return False
    before = algorithm.kl_coef != 0 or algorithm.use_opd or (algorithm.use_tis and algorithm.tis_batch_normalize)
    before = before or algorithm.custom_advantage_function_path is not None or algorithm.use_routing_replay or algorithm.use_rollout_entropy
    return before or (num_steps > 1 and not algorithm.use_rollout_logprobs)
