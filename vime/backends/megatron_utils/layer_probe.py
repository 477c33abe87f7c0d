"""Whether Transformer Engine is there; asked before Megatron is imported."""

from __future__ import annotations

import importlib.util

import torch

__all__ = ["has_transformer_engine"]


def has_transformer_engine() -> bool:
    """Transformer Engine is installed and there is a GPU to use it on."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
