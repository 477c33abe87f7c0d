"""The loss of one micro-batch, from vocabulary-parallel logits.

What is returned is this micro-batch's share of the step's mean: added up over all micro-batches of all data-parallel ranks
it IS the step's loss, and so are the metrics. Gradients must therefore be summed, never averaged.

    policy_loss    `loss_policy.py`
    value_loss     the critic's (value_loss.py)
    sft_loss       negative log-likelihood (sft.py)
    custom_loss    the user's function
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.utils.checkpoint import checkpoint

from vime.algorithms.sft import negative_log_likelihood
from vime.algorithms.value_loss import clipped_value_loss
from vime.backends.megatron_utils.log_probs import put_together, token_log_probs
from vime.backends.megatron_utils.loss_policy import LossHooks, Metrics, mean, policy_loss, required
from vime.config.sections import AlgorithmConfig
from vime.errors import ConfigError, HookError
from vime.packing.pack import PackedBatch

__all__ = ["CustomLoss", "LossHooks", "at_rows", "loss_from_logits", "packed_log_probs", "value_loss"]

KINDS = ("policy_loss", "sft_loss")  # besides custom_loss
CustomLoss = Callable[[Any, dict[str, Any], torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], tuple[torch.Tensor, Metrics]]


def packed_log_probs(
    logits: torch.Tensor,
    packed: PackedBatch,
    *,
    temperature: float,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    rows: torch.Tensor | None = None,
    cp_group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    chunk_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(log-probs [T], entropies [T] or None) of the trained tokens of `packed`; 0 at all other positions.

    `logits` [N, V / tp] are those of the positions `rows` [N] i64, as `model.forward_logits` gives them (T stands for padding), or
    [T, V / tp] of all with None. Collective over `tp_group`, and over `cp_group`, whose ranks have different rows: what they compute is
    put together, so that each has the whole, and a gradient flows back to the rank whose row it is of. `chunk_rows` as in
    `token_log_probs`.
    """
    labels, kept = packed.labels, packed.kept
    if rows is not None:
        inside = rows.clamp(max=packed.num_tokens - 1)
        labels, kept = labels[inside], None if kept is None else kept.of(inside)
    log_probs, entropy = token_log_probs(
        logits,
        labels,
        tp_group=tp_group,
        temperature=temperature,
        vocab_size=vocab_size,
        rows=packed.trained_rows if rows is None else None,
        with_entropy=with_entropy,
        entropy_grad=entropy_grad,
        chunk_rows=chunk_rows,
        kept=kept,
    )
    if rows is None:
        return log_probs, entropy
    return at_rows(log_probs, packed, rows, cp_group), None if entropy is None else at_rows(entropy, packed, rows, cp_group)


def at_rows(values: torch.Tensor, packed: PackedBatch, rows: torch.Tensor, cp_group: dist.ProcessGroup | None) -> torch.Tensor:
    """[T] from `values` [N] of the positions `rows`, put together over `cp_group`; 0 where nothing is trained. Differentiable."""
    trained = F.pad(packed.loss_mask, (0, 1))[rows] > 0
    zeros = values.new_zeros(packed.num_tokens + 1)
    return put_together(zeros.index_copy(0, rows, values.where(trained, 0.0))[:-1], cp_group)


def loss_from_logits(
    logits: torch.Tensor,
    packed: PackedBatch,
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    rows: torch.Tensor | None = None,
    cp_group: dist.ProcessGroup | None = None,
    hooks: LossHooks | None = None,
    chunk_rows: int | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """(loss scalar, metric sums) of one micro-batch; see the module's docstring for how they add up.

    `logits` [T, V / tp], or [N, V / tp] with `rows` as in `packed_log_probs`, stay as they are. `temperature` is the sampling
    temperature: the policy is softmax(logits / it). `vocab_size` is the size without padding columns. `packed.old_log_probs`
    None means that the policy has not been updated since it generated: old = current, detached. `hooks` are the
    user's functions; --loss-type custom_loss needs the logits of all positions (`rows` None). The metrics are detached scalars
    with slime's names, without the prefix "train/". `chunk_rows` as in `token_log_probs`. Collective over both groups. Raises DataError
    when `packed` lacks what the loss needs, HookError when the user's function fails.
    """
    kind, hooks = algorithm.loss_type, hooks or LossHooks()
    if kind == "custom_loss":
        compute = partial(
            token_log_probs, logits, packed.labels, tp_group=tp_group, temperature=temperature, vocab_size=vocab_size,
            chunk_rows=chunk_rows, kept=packed.kept,
        )  # fmt: skip
        return _custom_loss(logits, packed, hooks, compute)
    if kind not in KINDS:
        raise ConfigError(f"--loss-type {kind} is unknown; known are {', '.join(KINDS)}, custom_loss.")
    log_probs, entropy = packed_log_probs(
        logits,
        packed,
        temperature=temperature,
        tp_group=tp_group,
        vocab_size=vocab_size,
        rows=rows,
        cp_group=cp_group,
        with_entropy=kind == "policy_loss",
        entropy_grad=algorithm.entropy_coef != 0,
        chunk_rows=chunk_rows,
    )
    if kind == "sft_loss":
        return _sft_loss(log_probs, packed)
    assert entropy is not None
    loss, metrics = policy_loss(log_probs, entropy, packed, algorithm, hooks)
    return loss, _detached(metrics, loss)


def _sft_loss(log_probs: torch.Tensor, packed: PackedBatch) -> tuple[torch.Tensor, Metrics]:
    """Negative log-likelihood."""
    loss = mean(packed, negative_log_likelihood(log_probs))
    return loss, _detached({}, loss)


def value_loss(values: torch.Tensor, packed: PackedBatch, *, value_clip: float) -> tuple[torch.Tensor, Metrics]:
    """(loss scalar, metric sums) of the critic's values [T] (what stands at untrained positions does not matter).

    `packed.values` are those before the step, `packed.returns` what they are to predict. Metrics as in `loss_from_logits`.
    """
    old, returns = required(packed, "values", "the value loss"), required(packed, "returns", "the value loss")
    per_token, clipped = clipped_value_loss(values, old, returns, value_clip=value_clip)
    loss = mean(packed, per_token)
    metrics = {"value_loss": loss, "value_clipfrac": mean(packed, clipped), "values": mean(packed, old), "returns": mean(packed, returns)}
    return loss, _detached(metrics, loss)


def _custom_loss(
    logits: torch.Tensor, packed: PackedBatch, hooks: LossHooks, compute: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
) -> tuple[torch.Tensor, Metrics]:
    """Call fn(args, batch, logits, sum_of_sample_mean) with slime's scales, and bring the result to ours.

    `logits` come as [1, T, V / tp], not yet divided by the temperature. `sum_of_sample_mean(x)` takes response-aligned
    values, [sum of R], and gives the sum over the rollouts of their token means (with --calculate-per-token-loss: the sum over
    the tokens). The framework then divides loss and metrics by the rollouts (tokens) of the whole step. `compute`, with or without
    entropies, gives the log-probs of `logits`. With `hooks.recompute` the function is called once more in the backward pass.
    """
    if hooks.custom_loss is None:
        raise ConfigError("--loss-type custom_loss needs --custom-loss-function-path: fn(args, batch, logits, sum_of_sample_mean).")
    weights = torch.cat(packed.gather(packed.loss_weight)) * packed.denominator

    def sum_of_sample_mean(values: torch.Tensor) -> torch.Tensor:
        if values.shape != weights.shape:
            raise ValueError(f"sum_of_sample_mean takes one value per response token, {tuple(weights.shape)}, not {tuple(values.shape)}.")
        return (weights * values).sum()

    def log_probs(*, with_entropy: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        values, entropy = compute(with_entropy=with_entropy, entropy_grad=with_entropy)
        return packed.gather(values), None if entropy is None else packed.gather(entropy)

    call = partial(checkpoint, hooks.custom_loss, use_reentrant=False) if hooks.recompute else hooks.custom_loss
    try:
        loss, metrics = call(hooks.args, _hook_batch(packed, log_probs), logits.unsqueeze(0), sum_of_sample_mean)
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
        "values": "values",
        "returns": "returns",
    }
    for ours, slimes in names.items():
        values = getattr(packed, ours)
        if values is not None:
            batch[slimes] = packed.gather(values)
    if "advantages" in batch:
        batch["returns"] = batch.get("returns", batch["advantages"])  # the same without a critic
    return batch


def _detached(metrics: Metrics, loss: torch.Tensor) -> Metrics:
    """The metrics with the loss in front, cut from the graph."""
    return {name: value.detach() for name, value in {"loss": loss, **metrics}.items()}
