"""One micro-batch as one packed row of tokens, with everything a loss needs in the same alignment.

Position t of every [T] tensor belongs to *predicting token t + 1*: `labels[t]` is that token, `loss_mask[t]` says whether
it is trained, `loss_weight[t]` what it weighs in the step's mean. The last position of each sequence predicts nothing.

    tokens      5 9 2 17 1 | 5 9 3       two samples: response lengths 2 and 1
    labels      9 2 17 1 0 | 9 3 0
    loss_mask   0 0 1  1 0 | 0 1 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from vime.config.sections import AlgorithmConfig
from vime.errors import DataError
from vime.types import FILLER_ID, StepPlan, TrainSample

__all__ = ["AGGREGATIONS", "KeptTokens", "PackedBatch", "aggregation_of", "pack"]

AGGREGATIONS = ("rollout", "sequence", "token", "constant")
TOKEN_VALUES = (
    "advantages", "returns", "values", "old_log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs", "weight_versions",
    "entropies",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """The tokens that top-k and top-p sampling left to choose from, of each of n positions; none = all of the vocabulary."""

    ids: torch.Tensor  # [K] i64, position by position
    offsets: torch.Tensor  # [n + 1] i64: position t has ids[offsets[t] : offsets[t + 1]]

    def of(self, rows: torch.Tensor) -> KeptTokens:
        """Those of the positions `rows` [N] i64."""
        count = self.offsets[rows + 1] - self.offsets[rows]
        ends = count.cumsum(0)
        entry = torch.arange(int(count.sum()), device=rows.device) + (self.offsets[rows] - (ends - count)).repeat_interleave(count)
        return KeptTokens(ids=self.ids[entry], offsets=torch.cat([ends.new_zeros(1), ends]))

    def to(self, device: torch.device | str) -> KeptTokens:
        """A copy on `device`."""
        return KeptTokens(ids=self.ids.to(device, non_blocking=True), offsets=self.offsets.to(device, non_blocking=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """n sequences in one row of T tokens. A padding sequence at the end, if any, is in `cu_seqlens` but is no sample.

    The sum of `loss_weight * x` over all micro-batches of all data-parallel ranks is the step's mean of x.
    """

    tokens: torch.Tensor  # [T] i64
    position_ids: torch.Tensor  # [T] i64, from 0 in each sequence
    cu_seqlens: torch.Tensor  # [n + 1] i32, starts of the sequences and T
    max_seqlen: int
    labels: torch.Tensor  # [T] i64, the next token of the same sequence; 0 at its last position
    loss_mask: torch.Tensor  # [T] f32, 1 where `labels` is a trained token
    loss_weight: torch.Tensor  # [T] f32, loss_mask x weight in the step's mean
    sequence_ids: torch.Tensor  # [T] i64, index of the sample in this micro-batch; -1 on padding
    sample_ids: tuple[int, ...]  # TrainSample.sample_id of each sample
    lengths: tuple[int, ...]  # tokens of each sample
    response_lengths: tuple[int, ...]  # response tokens of each sample
    rollout_mask_sums: tuple[float, ...]  # trained tokens of each sample's whole rollout
    denominator: float  # of the step's mean, over all ranks: rollouts, samples or trained tokens
    advantages: torch.Tensor | None = None  # [T] f32; these are 0 outside responses
    returns: torch.Tensor | None = None  # [T] f32, what the critic is to predict
    values: torch.Tensor | None = None  # [T] f32, the critic's before the step
    old_log_probs: torch.Tensor | None = None  # [T] f32
    rollout_log_probs: torch.Tensor | None = None  # [T] f32
    ref_log_probs: torch.Tensor | None = None  # [T] f32
    mean_importance: float = 1.0  # of the step's importance weights, which the loss divides by
    kept: KeptTokens | None = None  # what the label of each of the T positions was sampled from
    teacher_log_probs: torch.Tensor | None = None  # [T] f32
    entropies: torch.Tensor | None = None  # [T] f32, in nats, of the old policy where the label was sampled
    routed: torch.Tensor | None = None  # [T, layers, k] i16, the experts that the engine chose; -1 where it does not say
    weight_versions: torch.Tensor | None = None  # [T] f32, a whole number; -1 where none is known

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return len(self.tokens)

    @property
    def is_filler(self) -> bool:
        """It holds no sample, and is there because other ranks have one."""
        return set(self.sample_ids) == {FILLER_ID}

    @property
    def trained_rows(self) -> torch.Tensor:
        """[N] i64: the positions whose label is trained."""
        return self.loss_mask.nonzero().squeeze(-1)

    @property
    def scored_rows(self) -> torch.Tensor:
        """[N >= 1] i64: `trained_rows`, or position 0 where nothing is trained, so that a pass over them is never empty."""
        rows = self.trained_rows
        return rows if len(rows) else torch.zeros(1, dtype=torch.int64, device=rows.device)

    def response_slices(self) -> list[slice]:
        """Of each sample: the R positions that predict its response."""
        out, end = [], 0
        for length, response in zip(self.lengths, self.response_lengths, strict=True):
            end += length
            out.append(slice(end - 1 - response, end - 1))
        return out

    def scatter(self, per_sample: Sequence[torch.Tensor]) -> torch.Tensor:
        """Response-aligned values, one [R] tensor a sample, as one f32 [T] tensor that is 0 elsewhere.

        Raises ValueError when the number of samples or a length differs.
        """
        for values, response in zip(per_sample, self.response_lengths, strict=True):
            if len(values) != response:
                raise ValueError(f"scatter: a sample has {response} response tokens but {len(values)} values.")
        ends, sizes = np.cumsum(self.lengths), np.array(self.response_lengths)
        inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # place in the own response
        where = torch.from_numpy(np.repeat(ends - 1 - sizes, sizes) + inside)
        out = torch.zeros(self.num_tokens, dtype=torch.float32, device=self.tokens.device)
        out[where.to(out.device)] = torch.cat(list(per_sample)).to(out)
        return out

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `scatter`: from [T, ...] one [R, ...] view a sample. Differentiable."""
        return [values[where] for where in self.response_slices()]

    def with_token_values(self, **values: torch.Tensor | Sequence[torch.Tensor]) -> PackedBatch:
        """A copy with some of TOKEN_VALUES set.

        Each is a packed [T] tensor, or one response-aligned [R] tensor a sample.
        """
        unknown = sorted(set(values) - set(TOKEN_VALUES))
        if unknown:
            raise ValueError(f"with_token_values: unknown {', '.join(unknown)}; known are {', '.join(TOKEN_VALUES)}.")
        packed = {}
        for name, value in values.items():
            packed[name] = value if isinstance(value, torch.Tensor) else self.scatter(value)
            if packed[name].shape != self.tokens.shape:
                raise ValueError(f"with_token_values: {name} has shape {tuple(packed[name].shape)}, expected {tuple(self.tokens.shape)}.")
        return replace(self, **packed)

    def emptied(self, num_tokens: int = 2) -> PackedBatch:
        """Its first `num_tokens` tokens (or all, where it has fewer) with nothing trained: weight 0 in every mean."""
        cut = {f.name: getattr(self, f.name)[:num_tokens] for f in fields(self) if isinstance(getattr(self, f.name), torch.Tensor)}
        size = len(cut["tokens"])
        cut |= {name: torch.zeros_like(cut[name]) for name in ("loss_mask", "loss_weight", "sequence_ids")}
        cut |= {"position_ids": torch.arange(size, device=self.tokens.device), "cu_seqlens": self.cu_seqlens.new_tensor([0, size])}
        own: dict[str, Any] = {"sample_ids": (FILLER_ID,), "lengths": (size,), "response_lengths": (size - 1,)}
        return replace(self, max_seqlen=size, rollout_mask_sums=(0.0,), kept=None, **own, **(cut | {"routed": None}))

    def to(self, device: torch.device | str) -> PackedBatch:
        """A copy with all tensors on `device`."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {k: v.to(device, non_blocking=True) for k, v in moved.items() if isinstance(v, torch.Tensor)}
        return replace(self, **tensors, kept=None if self.kept is None else self.kept.to(device))


def aggregation_of(algorithm: AlgorithmConfig) -> str:
    """How the tokens of a step are averaged: one of AGGREGATIONS."""
    return "token" if algorithm.calculate_per_token_loss else algorithm.loss_aggregation


def token_weight(sample: TrainSample, plan: StepPlan, *, aggregation: str, constant_length: int = 0) -> float:
    """What one trained token of `sample` weighs in the step's mean.

    rollout   1 / trained tokens of the rollout / rollouts of the step (GRPO, arXiv:2402.03300, eq. 3, all segments of a rollout as
              one output); a rollout without trained tokens weighs 0 and still counts among the rollouts
    sequence  1 / trained tokens of the sample / samples of the step: each segment of a rollout is an output
    token     1 / trained tokens of the step (DAPO, arXiv:2503.14476, eq. 8, over the whole step)
    constant  1 / `constant_length` / rollouts of the step (Dr. GRPO, arXiv:2503.20783, section 3.2: no division by the own length)
    """
    size, count = _denominators(sample, plan, aggregation, constant_length)
    return 1.0 / size / count if size > 0 and count > 0 else 0.0


def _denominators(sample: TrainSample, plan: StepPlan, aggregation: str, constant_length: int) -> tuple[float, float]:
    """(within the output, over the step)."""
    if aggregation == "token":
        return 1.0, plan.num_tokens
    if aggregation == "sequence":
        return float(sample.loss_mask.sum()), plan.num_sequences
    return (constant_length if aggregation == "constant" else sample.rollout_mask_sum), plan.num_rollouts


def pack(
    samples: Sequence[TrainSample], plan: StepPlan, *, aggregation: str = "rollout", constant_length: int = 0, multiple_of: int = 1
) -> PackedBatch:
    """Lay `samples` of one micro-batch one after the other, padded so that T is a multiple of `multiple_of`.

    Padding is a sequence of its own (token 0, weight 0, sequence id -1). The engine's and the teacher's log-probs are set when the samples
    have them. `aggregation` and `constant_length` as in `token_weight`. Raises DataError when `samples` is empty, or when only some
    have log-probs.
    """
    if not samples:
        raise DataError("pack: a micro-batch needs at least one sample; the plan should have put a filler there.")
    for sample in samples:
        _check(sample)
    lengths = [s.length for s in samples]
    padding = -sum(lengths) % multiple_of
    sizes = torch.tensor(lengths + ([padding] if padding else []))
    total = int(sizes.sum())
    starts = torch.zeros(len(sizes) + 1, dtype=torch.int64)
    starts[1:] = sizes.cumsum(0)

    tokens = torch.zeros(total, dtype=torch.int64)
    # concatenate copies: the arrays that Ray hands over are read-only
    tokens[: total - padding] = torch.from_numpy(np.concatenate([s.tokens for s in samples]).astype(np.int64, copy=False))
    labels = torch.zeros_like(tokens)
    labels[:-1] = tokens[1:]
    labels[starts[1:] - 1] = 0
    sequence_ids = torch.arange(len(sizes)).repeat_interleave(sizes)
    position_ids = torch.arange(total) - starts[sequence_ids]
    sequence_ids[total - padding :] = -1

    zeros = torch.zeros(total, dtype=torch.float32)
    packed = PackedBatch(
        tokens=tokens,
        position_ids=position_ids,
        cu_seqlens=starts.to(torch.int32),
        max_seqlen=int(sizes.max()),
        labels=labels,
        loss_mask=zeros,
        loss_weight=zeros,
        sequence_ids=sequence_ids,
        sample_ids=tuple(s.sample_id for s in samples),
        lengths=tuple(lengths),
        response_lengths=tuple(s.response_length for s in samples),
        rollout_mask_sums=tuple(s.rollout_mask_sum for s in samples),
        denominator=float(_denominators(samples[0], plan, aggregation, constant_length)[1]),
    )
    mask = packed.scatter([torch.tensor(s.loss_mask) for s in samples])
    weights = torch.tensor(
        [token_weight(s, plan, aggregation=aggregation, constant_length=constant_length) for s in samples] + [0.0], dtype=torch.float32
    )
    packed = replace(packed, loss_mask=mask, loss_weight=mask * weights[sequence_ids])
    known = {name: values for name in ("rollout_log_probs", "teacher_log_probs", "weight_versions") if (values := _of_all(samples, name))}
    packed = packed.with_token_values(**known) if known else packed
    packed = replace(packed, routed=_routed(samples, packed)) if any(s.routed_experts is not None for s in samples) else packed
    return replace(packed, kept=_kept(samples, packed)) if any(s.kept_offsets is not None for s in samples) else packed


def _of_all(samples: Sequence[TrainSample], name: str) -> list[torch.Tensor]:
    """A per-token field of all samples; empty when none has it."""
    known = [torch.tensor(value) for s in samples if (value := getattr(s, name)) is not None]
    if known and len(known) < len(samples):
        lacking = next(s.sample_id for s in samples if getattr(s, name) is None)
        raise DataError(f"sample {lacking} has no {name} but others of its micro-batch have; give them to all samples or to none.")
    return known


def _routed(samples: Sequence[TrainSample], packed: PackedBatch) -> torch.Tensor:
    """[T, layers, k]: the engine's routing at each sample's tokens, -1 elsewhere."""
    known = {s.sample_id: s.routed_experts.shape[1:] for s in samples if s.routed_experts is not None}
    sizes = set(known.values())
    if len(sizes) > 1:
        raise DataError(f"samples {list(known)} have routed_experts of several shapes, {sorted(sizes)}: engines of one model give one.")
    out = torch.full((packed.num_tokens, *sizes.pop()), -1, dtype=torch.int16)
    start = 0
    for sample in samples:
        if sample.routed_experts is not None:
            out[start : start + len(sample.routed_experts)] = torch.from_numpy(np.array(sample.routed_experts))
        start += sample.length
    return out


def _kept(samples: Sequence[TrainSample], packed: PackedBatch) -> KeptTokens:
    """The samples' kept tokens at the positions that predict their responses."""
    counts = torch.zeros(packed.num_tokens, dtype=torch.int64)
    ids = [torch.zeros(0, dtype=torch.int64)]
    for sample, where in zip(samples, packed.response_slices(), strict=True):
        if sample.kept_offsets is not None and sample.kept_ids is not None:
            counts[where] = torch.from_numpy(np.diff(sample.kept_offsets).astype(np.int64))
            ids.append(torch.from_numpy(sample.kept_ids.astype(np.int64)))
    return KeptTokens(ids=torch.cat(ids), offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


def _check(sample: TrainSample) -> None:
    """Raise DataError unless the sample's lengths agree: what does not agree here would train the wrong tokens."""
    response = sample.response_length
    if not 0 <= response < sample.length:
        raise DataError(
            f"sample {sample.sample_id}: response_length {response} with {sample.length} tokens; "
            "expected at least one token before the response, since a token is predicted from what precedes it."
        )
    for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs", "weight_versions"):
        value = getattr(sample, name)
        if value is not None and len(value) != response:
            raise DataError(f"sample {sample.sample_id}: {name} has {len(value)} values for {response} response tokens.")
