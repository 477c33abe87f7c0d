"""Gated delta nets (arXiv:2412.06464) over packed sequences in plain torch, on the CPU and on machines without the fla kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

from vime.backends.megatron_utils.norm import RMSNorm
from vime.backends.megatron_utils.packed_params import PackedParams, attention_plan
from vime.errors import ConfigError

__all__ = ["DeltaNet", "HeadNorm", "causal_convolution", "gated_delta_rule"]

CHUNK = 64  # tokens that are computed by products of matrices; between chunks goes the state
common.HAVE_FLA = True  # Megatron's constructor asks for the kernels; `DeltaNet` calls none of them


def causal_convolution(x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Each channel's convolution with what precedes a token in its own sequence.

    x [T, C]; weight [C, K], the last for the token itself; positions [T] i64 within the sequences -> [T, C].
    """
    out = x * weight[:, -1]
    for back in range(1, weight.shape[1]):
        shifted = F.pad(x, (0, 0, back, 0))[: len(x)]
        out = out + (shifted * weight[:, -1 - back]).where(positions[:, None] >= back, 0.0)
    return out


def gated_delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T, o_t = S_t^T q_t / sqrt(D) (arXiv:2412.06464, eq. 10), with S_0 = 0.

    q, k [B, L, H, D] of unit length; v [B, L, H, V]; g = log a and beta = b [B, L, H] -> o [B, L, H, V] in v's dtype. Within a
    chunk all tokens are computed at once: the corrections u_t = b_t (v_t - a_t S_{t-1}^T k_t) solve a triangular system.
    """
    length, dtype = q.shape[1], v.dtype
    pad = -length % CHUNK
    q, k, v, g, beta = (F.pad(x.float().transpose(1, 2), (0, 0) * (x.ndim - 3) + (0, pad)) for x in (q, k, v, g, beta))
    q, k, v = (x.unflatten(2, (-1, CHUNK)) for x in (q * q.shape[-1] ** -0.5, k, v))  # [B, H, N, C, .]
    decay, beta = g.unflatten(2, (-1, CHUNK)).cumsum(-1), beta.unflatten(2, (-1, CHUNK))[..., None]  # log of the product so far
    since = decay[..., :, None] - decay[..., None, :]
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    since = since.masked_fill(~seen, float("-inf")).exp()  # [B, H, N, C, C]: what is left of token j at token i
    grown = decay.exp()[..., None]
    system = (beta * (k @ k.transpose(-1, -2)) * since).tril(-1)  # the solver takes its diagonal as 1
    right = torch.cat([beta * v, beta * grown * k], dim=-1)
    fresh, old = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split([v.shape[-1], k.shape[-1]], dim=-1)
    inner = (q @ k.transpose(-1, -2)) * since
    queries, last = grown * q, decay[..., -1:]
    keys = (last - decay).exp()[..., None] * k
    state = v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    out = []
    for n in range(q.shape[2]):
        u = fresh[:, :, n] - old[:, :, n] @ state
        out.append(queries[:, :, n] @ state + inner[:, :, n] @ u)
        state = last[:, :, n, :, None].exp() * state + keys[:, :, n].transpose(-1, -2) @ u
    return torch.cat(out, dim=2)[:, :, :length].transpose(1, 2).to(dtype)


class HeadNorm(RMSNorm):
    """RMSNorm of one head of values, the same for the heads of all tensor-parallel ranks, over which its gradient is summed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unit = False
        torch.nn.init.ones_(self.weight)
        self.weight.sequence_parallel = False  # type: ignore[attr-defined]

    def scale(self) -> torch.Tensor:
        """The factor [D]."""
        return copy_to_tensor_model_parallel_region(self.weight)


class DeltaNet(GatedDeltaNet):
    """Megatron's parameters and checkpoints with the computation above."""

    def _setup_variant_attrs(self) -> None:
        if self.config.context_parallel_size > 1:
            raise ConfigError("--context-parallel-size: not available for models with linear attention: its state runs along a sequence.")
        super()._setup_variant_attrs()
        self.gated_delta_rule = gated_delta_rule

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """[T, 1, H] (sequence parallel: its part of T) -> the same."""
        params: PackedParams = kwargs["packed_seq_params"]
        projected = self.in_proj(hidden_states)[0].squeeze(1)
        total = len(projected)
        starts = params.cu_seqlens_q.long()
        lengths = (starts[1:] - starts[:-1]).to(projected.device)
        positions = torch.arange(total, device=projected.device) - starts[:-1].repeat_interleave(lengths, output_size=total)
        mixed, gate, beta, alpha = projected.split(self.feat_dim_split, dim=-1)
        mixed = self.act_fn(causal_convolution(mixed, self.conv1d.weight.squeeze(1), positions))
        query, key, value = mixed.split([self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp], dim=-1)
        query, key = (self._heads(x) for x in (query, key))
        value = value.view(total, -1, self.value_head_dim)
        g = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias)
        out = self._packed(params, query, key, value, g, beta.sigmoid())
        out = self._apply_gated_norm(out, gate.reshape(total, -1, self.value_head_dim))
        return self.out_proj(out.view(total, 1, -1))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[T, local heads x D] -> [T, heads of values, D], each of unit length."""
        x = x.view(len(x), -1, self.key_head_dim)
        x = x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6).to(x.dtype)
        return x.repeat_interleave(self.num_value_heads // self.num_key_heads, dim=1)

    def _packed(self, params: PackedParams, *inputs: torch.Tensor) -> torch.Tensor:
        """The rule on sequences of similar length at a time."""
        plan = params.plan or attention_plan(params.cu_seqlens_q.cpu())
        slots = [x.index_select(0, plan.slot_to_token.to(x.device)) for x in inputs]
        outputs, start = [], 0
        for shape in plan.shapes:
            stop = start + shape.rows * shape.longest
            rows = [x[start:stop].unflatten(0, (shape.rows, shape.longest)) for x in slots]
            outputs.append(self.gated_delta_rule(*rows).flatten(0, 1))
            start = stop
        return torch.cat(outputs).index_select(0, plan.token_to_slot.to(inputs[0].device))
