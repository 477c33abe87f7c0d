"""The loss of one micro-batch, from vocabulary-parallel logits.

What is returned is this micro-batch's share of the step's mean: added up over all micro-batches of all data-parallel ranks
it IS the step's loss, and so are the metrics. Gradients must therefore be summed, never averaged.

    policy_loss    clipped surrogate (ppo_clip.py) - entropy_coef x entropy + kl_loss_coef x KL estimate (kl.py)
    sft_loss       negative log-likelihood (sft.py)
    custom_loss    the user's function
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from vime.algorithms.ppo_clip import clipped_policy_loss
from vime.algorithms.registry import KL_ESTIMATORS
from vime.algorithms.sft import negative_log_likelihood
from vime.backends.megatron_utils.log_probs import token_log_probs
from vime.config.sections import AlgorithmConfig
from vime.errors import ConfigError, DataError, HookError
from vime.packing.pack import PackedBatch

__all__ = ["CustomLoss", "loss_from_logits", "packed_log_probs"]

Metrics = dict[str, torch.Tensor]
CustomLoss = Callable[[Any, dict[str, Any], torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], tuple[torch.Tensor, Metrics]]


def packed_log_probs(
    logits: torch.Tensor,
    packed: PackedBatch,
    *,
    temperature: float,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    rows: torch.Tensor | None = None,
    with_entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(log-probs [T], entropies [T] or None) of the trained tokens of `packed`; 0 at all other positions.

    `logits` [N, V / tp] are those of the positions `rows` [N] i64 (what `packed.scored_rows` gives), or [T, V / tp] of all with
    None. Collective over `tp_group`.
    """
    log_probs, entropy = token_log_probs(
        logits,
        packed.labels if rows is None else packed.labels[rows],
        tp_group=tp_group,
        temperature=temperature,
        vocab_size=vocab_size,
        rows=packed.trained_rows if rows is None else None,
        with_entropy=with_entropy,
        entropy_grad=entropy_grad,
        kept=packed.kept if packed.kept is None or rows is None else packed.kept.of(rows),
    )
    if rows is None:
        return log_probs, entropy
    zeros = log_probs.new_zeros(packed.num_tokens)
    return zeros.index_copy(0, rows, log_probs), None if entropy is None else zeros.index_copy(0, rows, entropy)


def loss_from_logits(
    logits: torch.Tensor,
    packed: PackedBatch,
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    rows: torch.Tensor | None = None,
    custom_loss: CustomLoss | None = None,
    args: Any = None,
) -> tuple[torch.Tensor, Metrics]:
    """(loss scalar, metric sums) of one micro-batch; see the module's docstring for how they add up.

    `logits` [T, V / tp], or [N, V / tp] with `rows` as in `packed_log_probs`, stay as they are. `temperature` is the sampling
    temperature: the policy is softmax(logits / it). `vocab_size` is the size without padding columns. `packed.old_log_probs`
    None means that the policy has not been updated since it generated: old = current, detached. `custom_loss` and `args` are
    for --loss-type custom_loss only, which needs the logits of all positions (`rows` None). The metrics are detached scalars
    with slime's names, without the prefix "train/". Collective over `tp_group`. Raises DataError when `packed` lacks what the
    loss needs, HookError when the user's function fails.
    """
    kind = algorithm.loss_type
    if kind == "custom_loss":
        return _custom_loss(logits, packed, custom_loss, args, temperature, tp_group, vocab_size)
    if kind not in LOSSES:
        raise ConfigError(f"--loss-type {kind} is unknown; known are {', '.join(LOSSES)}, custom_loss.")
    log_probs, entropy = packed_log_probs(
        logits,
        packed,
        temperature=temperature,
        tp_group=tp_group,
        vocab_size=vocab_size,
        rows=rows,
        with_entropy=kind == "policy_loss",
        entropy_grad=algorithm.entropy_coef != 0,
    )
    return LOSSES[kind](log_probs, entropy, packed, algorithm)


def _mean(packed: PackedBatch, values: torch.Tensor) -> torch.Tensor:
    """This micro-batch's share of the step's mean of `values` [T]."""
    return (packed.loss_weight * values).sum()


def _policy_loss(
    log_probs: torch.Tensor, entropy: torch.Tensor | None, packed: PackedBatch, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor, Metrics]:
    """Clipped surrogate, entropy bonus, KL to the reference."""
    advantages = _required(packed, "advantages", "--loss-type policy_loss")
    current = log_probs.detach()
    if algorithm.use_rollout_logprobs:
        old = _required(packed, "rollout_log_probs", "--use-rollout-logprobs")
    else:
        old = current if packed.old_log_probs is None else packed.old_log_probs
    per_token, clipped = clipped_policy_loss(
        log_probs,
        old,
        advantages,
        eps_clip=algorithm.eps_clip,
        eps_clip_high=algorithm.eps_clip_high,
        eps_clip_c=algorithm.eps_clip_c,
    )
    assert entropy is not None
    pg_loss, entropy_mean = _mean(packed, per_token), _mean(packed, entropy)
    loss = pg_loss
    metrics = {"pg_loss": pg_loss, "entropy_loss": entropy_mean, "pg_clipfrac": _mean(packed, clipped)}
    metrics["ppo_kl"] = _mean(packed, old - current)
    if algorithm.entropy_coef != 0:
        loss = loss - algorithm.entropy_coef * entropy_mean
    if algorithm.use_kl_loss:
        reference = _required(packed, "ref_log_probs", "--use-kl-loss")
        kl_loss = _mean(packed, KL_ESTIMATORS[algorithm.kl_loss_type](log_probs, reference))
        loss = loss + algorithm.kl_loss_coef * kl_loss
        metrics["kl_loss"] = kl_loss
    if packed.rollout_log_probs is not None:
        trainer = current if algorithm.use_rollout_logprobs else old
        metrics["train_rollout_logprob_abs_diff"] = _mean(packed, (trainer - packed.rollout_log_probs).abs())
    return loss, _detached(metrics, loss)


def _sft_loss(
    log_probs: torch.Tensor, entropy: torch.Tensor | None, packed: PackedBatch, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor, Metrics]:
    """Negative log-likelihood."""
    loss = _mean(packed, negative_log_likelihood(log_probs))
    return loss, _detached({}, loss)


LOSSES: Mapping[str, Callable[..., tuple[torch.Tensor, Metrics]]] = MappingProxyType({"policy_loss": _policy_loss, "sft_loss": _sft_loss})


def _custom_loss(
    logits: torch.Tensor,
    packed: PackedBatch,
    custom_loss: CustomLoss | None,
    args: Any,
    temperature: float,
    tp_group: dist.ProcessGroup | None,
    vocab_size: int | None,
) -> tuple[torch.Tensor, Metrics]:
    """Call fn(args, batch, logits, sum_of_sample_mean) with slime's scales, and bring the result to ours.

    `logits` come as [1, T, V / tp], not yet divided by the temperature. `sum_of_sample_mean(x)` takes response-aligned
    values, [sum of R], and gives the sum over the rollouts of their token means (with --calculate-per-token-loss: the sum over
    the tokens). The framework then divides loss and metrics by the rollouts (tokens) of the whole step.
    """
    if custom_loss is None:
        raise ConfigError("--loss-type custom_loss needs --custom-loss-function-path: fn(args, batch, logits, sum_of_sample_mean).")
    weights = torch.cat(packed.gather(packed.loss_weight)) * packed.denominator

    def sum_of_sample_mean(values: torch.Tensor) -> torch.Tensor:
        if values.shape != weights.shape:
            raise ValueError(f"sum_of_sample_mean takes one value per response token, {tuple(weights.shape)}, not {tuple(values.shape)}.")
        return (weights * values).sum()

    def log_probs(*, with_entropy: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        values, entropy = token_log_probs(
            logits,
            packed.labels,
            tp_group=tp_group,
            temperature=temperature,
            vocab_size=vocab_size,
            with_entropy=with_entropy,
            entropy_grad=with_entropy,
            kept=packed.kept,
        )
        return packed.gather(values), None if entropy is None else packed.gather(entropy)

    try:
        loss, metrics = custom_loss(args, _hook_batch(packed, log_probs), logits.unsqueeze(0), sum_of_sample_mean)
    except Exception as error:
        raise HookError(f"--custom-loss-function-path raised {type(error).__name__}: {error}") from error
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise HookError(f"--custom-loss-function-path returned {type(loss).__name__} as loss; expected a tensor with one element.")
    share = 1.0 / packed.denominator if packed.denominator > 0 else 0.0
    loss = loss.reshape(()) * share
    as_tensors = {name: torch.as_tensor(value, device=logits.device) * share for name, value in metrics.items()}
    return loss, _detached(as_tensors, loss)


def _hook_batch(packed: PackedBatch, log_probs: Callable[..., Any]) -> dict[str, Any]:
    """slime's `batch`: per-sample lists under its names; besides, `packed` and a function that computes log-probs."""
    ends = torch.tensor(packed.lengths).cumsum(0).tolist()
    batch: dict[str, Any] = {
        "tokens": packed.tokens.unsqueeze(0),
        "unconcat_tokens": [packed.tokens[end - length : end] for end, length in zip(ends, packed.lengths, strict=True)],
        "total_lengths": list(packed.lengths),
        "response_lengths": list(packed.response_lengths),
        "loss_masks": packed.gather(packed.loss_mask),
        "rollout_mask_sums": list(packed.rollout_mask_sums),
        "sample_indices": list(packed.sample_ids),
        "packed": packed,
        "compute_log_probs": log_probs,
    }
    names = {
        "advantages": "advantages",
        "old_log_probs": "log_probs",
        "rollout_log_probs": "rollout_log_probs",
        "ref_log_probs": "ref_log_probs",
    }
    for ours, slimes in names.items():
        values = getattr(packed, ours)
        if values is not None:
            batch[slimes] = packed.gather(values)
    if "advantages" in batch:
        batch["returns"] = batch["advantages"]  # the same without a critic
    return batch


def _required(packed: PackedBatch, name: str, why: str) -> torch.Tensor:
    """A field of `packed` that must be there."""
    value = getattr(packed, name)
    if value is None:
        raise DataError(f"the micro-batch has no {name}, which {why} needs (samples {list(packed.sample_ids)[:4]}...).")
    return value


def _detached(metrics: Metrics, loss: torch.Tensor) -> Metrics:
    """The metrics with the loss in front, cut from the graph."""
    return {name: value.detach() for name, value in {"loss": loss, **metrics}.items()}
