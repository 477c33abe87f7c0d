"""Which flags each --advantage-estimator reads: what the rules need to know of algorithms without loading them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["ESTIMATORS", "EstimatorTraits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorTraits:
    """One estimator; `vime.algorithms.registry` has its functions."""

    compares: bool = False  # rewards are compared inside their group: --disable-rewards-normalization
    divides: bool = False  # ... and divided by the group's deviation: --disable-grpo-std-normalization
    token_kl: bool = False  # --kl-coef
    discounts: bool = False  # --gamma
    whitened: bool = False  # needs --normalize-advantages
    dual_clip: bool = True  # --eps-clip-c
    critic: bool = False  # --lambd and the critic's flags


ESTIMATORS: Mapping[str, EstimatorTraits] = MappingProxyType(
    {
        "grpo": EstimatorTraits(compares=True, divides=True),
        "gspo": EstimatorTraits(compares=True, divides=True),
        "cispo": EstimatorTraits(compares=True, divides=True, dual_clip=False),
        "rloo": EstimatorTraits(compares=True),
        "reinforce_plus_plus": EstimatorTraits(token_kl=True, discounts=True, whitened=True),
        "reinforce_plus_plus_baseline": EstimatorTraits(compares=True, token_kl=True, whitened=True),
        "ppo": EstimatorTraits(token_kl=True, discounts=True, critic=True),
    }
)
