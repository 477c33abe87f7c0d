"""Settings that follow from others, taken over once the command line is known to be right."""

from __future__ import annotations

from dataclasses import replace

from vime.config.run import RunConfig
from vime.config.sections import RECORDED_FUNCTION, EvalConfig

__all__ = ["with_implied"]


def with_implied(config: RunConfig) -> RunConfig:
    """--load-debug-rollout-data: the same command line, and samples come from files; no engine is started, nothing evaluated."""
    if config.debug.load_debug_rollout_data is None:
        return config
    return replace(
        config,
        debug=replace(config.debug, debug_train_only=True),
        rollout=replace(config.rollout, rollout_function_path=RECORDED_FUNCTION),
        eval=EvalConfig(),
        vllm_tokens=(),
        router_tokens=(),
    )
