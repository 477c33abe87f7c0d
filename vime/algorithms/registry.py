"""The names of algorithms. A new one is one file beside this one and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from vime.algorithms import grpo, kl
from vime.types import TrainSample

__all__ = ["ADVANTAGES", "KL_ESTIMATORS", "AdvantageEstimator", "KlEstimator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimator:
    """One value of --advantage-estimator."""

    function: Callable[[Sequence[TrainSample]], list[torch.Tensor]]  # one f32 [R] tensor a sample
    compares_in_group: bool  # rewards are normalised inside their group beforehand


KlEstimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (log_probs, ref_log_probs) -> per token

ADVANTAGES: Mapping[str, AdvantageEstimator] = MappingProxyType(
    {"grpo": AdvantageEstimator(function=grpo.group_relative_advantages, compares_in_group=True)}
)

KL_ESTIMATORS: Mapping[str, KlEstimator] = MappingProxyType({"k1": kl.k1, "k2": kl.k2, "k3": kl.k3, "low_var_kl": kl.low_var_kl})
