"""Multi-head latent attention over packed sequences, for machines without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from vime.backends.megatron_utils.packed_params import PackedParams

__all__ = ["LatentAttention"]


class _ByPosition(torch.nn.Module):
    """Megatron's rotary embedding, read at the positions of a packed row; Megatron's own would count on over the whole row."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.params: PackedParams | None = None

    @property
    def _params(self) -> PackedParams:
        assert self.params is not None
        return self.params

    def get_rotary_seq_len(self, *unused: Any) -> int:
        """Positions that occur."""
        return int(self._params.max_seqlen_q or 0)

    def forward(self, length: int, **unused: Any) -> Any:
        """Angles [T, 1, D], and with YaRN the scale of sines and cosines."""
        assert self._params.positions is not None
        out = self.inner(length, packed_seq=True)
        angles, *scale = out if isinstance(out, tuple) else (out,)
        taken = angles.squeeze(1).index_select(0, self._params.positions)
        return (taken, *scale) if scale else taken


class LatentAttention(MLASelfAttention):
    """Megatron's, told the positions of the tokens.

    Megatron's gathering of the keys' rotated part takes only this rank's heads into its gradient, though all heads share that
    part; here it takes those of all tensor-parallel ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        inner: Any = self.rotary_pos_emb  # type: ignore[has-type]
        self.rotary_pos_emb = _ByPosition(inner)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """[T, 1, H] -> ([T, 1, H], None)."""
        self.rotary_pos_emb.params = kwargs["packed_seq_params"]
        return super().forward(hidden_states, attention_mask, *args, **kwargs)

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, combined = super()._qkv_down_projection(hidden_states)
        sizes = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        if combined.shape[-1] == sum(sizes):
            return queries, combined
        combined = gather_from_tensor_model_parallel_region(combined, group=self.tp_group)
        if self.config.sequence_parallel:  # what follows gathers the rotated part over the sequence, and its gradient over the ranks
            return queries, scatter_to_sequence_parallel_region(combined, group=self.tp_group)
        plain, rotated = combined.split(sizes, dim=-1)
        return queries, torch.cat([plain, copy_to_tensor_model_parallel_region(rotated, group=self.tp_group)], dim=-1)
