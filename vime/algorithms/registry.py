"""The names of algorithms. A new one is one file beside this one and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from vime.algorithms import estimators, kl, policy_losses

__all__ = ["ADVANTAGES", "KL_ESTIMATORS", "AdvantageEstimator", "KlEstimator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimator:
    """One value of --advantage-estimator."""

    function: Callable[[estimators.Tokens], tuple[torch.Tensor, torch.Tensor]]  # (advantages, returns) of a sample's trained tokens
    comparison: str | None = None  # how rewards are compared in their group beforehand: one of group_norm.COMPARISONS
    policy_loss: policy_losses.PolicyLoss = policy_losses.clipped_ratio
    critic: bool = False


KlEstimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (log_probs, ref_log_probs) -> per token

ADVANTAGES: Mapping[str, AdvantageEstimator] = MappingProxyType(
    {
        "grpo": AdvantageEstimator(function=estimators.broadcast, comparison="mean_std"),
        "gspo": AdvantageEstimator(function=estimators.broadcast, comparison="mean_std", policy_loss=policy_losses.clipped_sequence_ratio),
        "cispo": AdvantageEstimator(function=estimators.broadcast, comparison="mean_std", policy_loss=policy_losses.clipped_weight),
        "rloo": AdvantageEstimator(function=estimators.broadcast, comparison="leave_one_out"),
        "reinforce_plus_plus": AdvantageEstimator(function=estimators.kl_penalised_returns),
        "reinforce_plus_plus_baseline": AdvantageEstimator(function=estimators.baseline_minus_kl, comparison="mean"),
        "ppo": AdvantageEstimator(function=estimators.actor_critic, critic=True),
    }
)

KL_ESTIMATORS: Mapping[str, KlEstimator] = MappingProxyType({"k1": kl.k1, "k2": kl.k2, "k3": kl.k3, "low_var_kl": kl.low_var_kl})
