"""The critic's output layer: one number a position instead of logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from vime.backends.megatron_utils.model import is_last

__all__ = ["ValueHead", "put_value_head"]


class ValueHead(torch.nn.Module):
    """hidden [..., H] -> values [..., 1] in float32. It begins as 0: the critic first learns returns, and then what to look at.

    Each tensor-parallel rank has the whole of it and computes the same.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))

    def forward(self, hidden: torch.Tensor, weight: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        """(values, no bias), as Megatron's output layers answer; `weight`, where it shares the embedding's, is not for this one."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float()), None


def put_value_head(chunks: Sequence[torch.nn.Module], config: TransformerConfig) -> None:
    """Replace the output layer of a built model's last chunk. Before its parameters are put into gradient buffers."""
    for chunk in chunks:
        chunk.share_embeddings_and_output_weights = False  # type: ignore[assignment]
        if is_last(chunk):
            chunk.output_layer = ValueHead(config)
