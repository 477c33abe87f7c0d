"""The sections of a run's configuration. Each part of the framework is handed the section it needs, nothing more.

Frozen, keyword-only, slotted. Names and defaults are slime's and Vime's; what departs from them is listed in docs/migrating.md.
"""

from vime.config.sections.algorithm import AlgorithmConfig, CriticConfig
from vime.config.sections.data import (
    DATA_SOURCE,
    RECORDED_FUNCTION,
    ROLLOUT_FUNCTION,
    SFT_FUNCTION,
    DataConfig,
    EvalConfig,
    RewardConfig,
    RolloutConfig,
)
from vime.config.sections.model import ENGINE_LORA_RANKS, POLICY_ADAPTER, CheckpointConfig, LoraConfig, ModelConfig, WeightUpdateConfig
from vime.config.sections.observe import DebugConfig, LoggingConfig
from vime.config.sections.placement import ClusterConfig, EngineConfig, FaultToleranceConfig, RouterConfig
from vime.config.sections.training import TrainingConfig

__all__ = [
    "DATA_SOURCE",
    "ENGINE_LORA_RANKS",
    "POLICY_ADAPTER",
    "RECORDED_FUNCTION",
    "ROLLOUT_FUNCTION",
    "SFT_FUNCTION",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "CriticConfig",
    "DataConfig",
    "DebugConfig",
    "EngineConfig",
    "EvalConfig",
    "FaultToleranceConfig",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RouterConfig",
    "TrainingConfig",
    "WeightUpdateConfig",
]
