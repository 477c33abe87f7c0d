"""The types that cross a border between parts of the framework.

Users meet `vime.utils.types.Sample`; everything here is between the rollout manager, the trainers and the engines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FILLER_ID", "MicroBatch", "StepPlan", "TrainBatch", "TrainSample", "VersionSpan", "WeightSyncReport"]


FILLER_ID = -1  # sample_id, group_id and rollout_id of a filler: two tokens that make ranks even, and count in nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One sequence to train on. T = tokens of prompt and response, R = tokens of the response (the last R of T).

    Example: tokens=[5, 9, 2, 17, 1], response_length=2 trains on predicting 17 and 1.
    """

    tokens: npt.NDArray[np.int64]  # [T]
    response_length: int  # R
    loss_mask: npt.NDArray[np.float32]  # [R] 0 or 1
    reward: float  # after group normalisation: what the advantage estimator starts from
    raw_reward: float  # as the reward function gave it
    sample_id: int  # Sample.index
    group_id: int  # Sample.group_index
    rollout_id: int  # Sample.rollout_id, or the sample's own index
    rollout_mask_sum: float  # trained tokens of the whole rollout, over all its segments
    rollout_log_probs: npt.NDArray[np.float32] | None = None  # [R] the engine's
    teacher_log_probs: npt.NDArray[np.float32] | None = None  # [R]
    kept_ids: npt.NDArray[np.int32] | None = None  # [K] the tokens that top-k and top-p sampling left, token by token
    kept_offsets: npt.NDArray[np.int64] | None = None  # [R + 1] response token i was drawn from kept_ids[offsets[i] : offsets[i + 1]]
    weight_versions: npt.NDArray[np.float32] | None = None  # [R] the version each token was sampled under; -1 where none is known
    routed_experts: npt.NDArray[np.int16] | None = None  # [t < T, layers, k] of the first t tokens, those the engine's routers chose
    truncated: bool = False
    metadata: dict[str, Any] | None = None

    @property
    def length(self) -> int:
        """T."""
        return len(self.tokens)


MicroBatch = tuple[int, ...]  # positions in TrainBatch.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One optimizer step of one data-parallel rank. All ranks have the same number of micro-batches."""

    micro_batches: tuple[MicroBatch, ...]
    num_rollouts: int  # rollouts in this step over all ranks: the denominator of the per-rollout mean
    num_tokens: float  # trained tokens in this step over all ranks: the denominator of the per-token mean
    num_sequences: int = 0  # samples in this step over all ranks: the denominator of the per-sequence mean


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """What one data-parallel rank trains on for one rollout step."""

    rollout_id: int
    samples: tuple[TrainSample, ...]
    steps: tuple[StepPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """`length` consecutive generated tokens were sampled under weight `version`."""

    version: str
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncReport:
    """One weight sync, measured on the trainer's side."""

    version: int
    num_bytes: int  # payload, summed over engines
    seconds: float  # from pause to resume, proof included
    num_tensors: int
    phases: dict[str, float] = field(default_factory=dict)  # seconds by phase: pause, start, transfer, finish, resume, proof
    proof_max_abs_diff: float = 0.0  # max |trainer - engine| over the probe's log-probs; nan when no engine was left
    lost: dict[str, str] = field(default_factory=dict)  # url -> why, of engines that failed meanwhile and were left behind

    @property
    def gigabytes_per_second(self) -> float:
        """Payload over the transfer phase alone."""
        seconds = self.phases.get("transfer", self.seconds)
        return self.num_bytes / seconds / 1e9 if seconds > 0 else 0.0
