"""GRPO advantages: the group-normalised reward of the rollout on each of its tokens.

DeepSeekMath, arXiv:2402.03300, section 4.1.2 (outcome supervision): A_{i,t} = (r_i - mean(r)) / std(r) for all t. The
normalisation itself is `group_norm.py`, done where whole groups are at hand; `reward` here is its result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vime.types import TrainSample

__all__ = ["group_relative_advantages"]


def group_relative_advantages(samples: Sequence[TrainSample]) -> list[torch.Tensor]:
    """One f32 [R] tensor a sample, constant over its response."""
    return [torch.full((s.response_length,), s.reward, dtype=torch.float32) for s in samples]
