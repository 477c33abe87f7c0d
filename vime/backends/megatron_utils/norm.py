"""RMSNorm for machines without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from vime.backends.megatron_utils.fused import rms_norm
from vime.errors import ConfigError

__all__ = ["RMSNorm"]


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467, eq. 4), or * (1 + weight) with `layernorm_zero_centered_gamma`.

    Megatron's own wrapper refuses sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ConfigError("without Transformer Engine only RMSNorm is there: drop --normalization.")
        self.eps = eps
        self.unit = config.layernorm_zero_centered_gamma
        device = torch.device("cpu") if config.use_cpu_initialization or not torch.cuda.is_available() else torch.cuda.current_device()
        start = torch.zeros if self.unit else torch.ones
        self.weight = torch.nn.Parameter(start(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # its gradient is summed over tensor parallel ranks

    def scale(self) -> torch.Tensor:
        """The factor [hidden_size]."""
        return self.weight + 1 if self.unit else self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        if x.device.type == "cpu" and x.dtype == torch.float32:
            return rms_norm(x, self.scale(), self.eps)
        if x.is_cuda:
            from vime.backends.megatron_utils import triton_kernels  # loaded where there is a device for it

            return triton_kernels.rms_norm(x, self.scale(), self.eps)
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.scale(), self.eps)
