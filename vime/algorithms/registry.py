"""The names of algorithms. A new one is one file beside this one and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from vime.algorithms import grpo, kl
from vime.types import TrainSample

__all__ = ["ADVANTAGES", "KL_ESTIMATORS", "AdvantageFunction", "KlEstimator"]

AdvantageFunction = Callable[[Sequence[TrainSample]], list[torch.Tensor]]  # one f32 [R] tensor a sample
KlEstimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (log_probs, ref_log_probs) -> per token

ADVANTAGES: Mapping[str, AdvantageFunction] = MappingProxyType({"grpo": grpo.group_relative_advantages})

KL_ESTIMATORS: Mapping[str, KlEstimator] = MappingProxyType({"k1": kl.k1, "k2": kl.k2, "k3": kl.k3, "low_var_kl": kl.low_var_kl})
