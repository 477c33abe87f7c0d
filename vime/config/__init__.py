"""Configuration. A leaf: imports no torch, ray, vllm or megatron."""

from vime.config.run import SECTIONS, ArgsView, RunConfig

__all__ = ["SECTIONS", "ArgsView", "RunConfig"]
