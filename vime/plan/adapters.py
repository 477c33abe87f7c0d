"""Memory of low-rank adapters (--lora-rank), by the linear layers of a model's shape."""

from __future__ import annotations

from dataclasses import dataclass

from vime.plan.settings import Settings
from vime.plan.shape import Delta, Latent, ModelSize

__all__ = ["Linear", "adapter_numbers", "adapter_weights", "linears"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear layer by its Hugging Face name; `count` of them where a mixture has one for each expert."""

    name: str
    inputs: int
    outputs: int
    row: bool = False  # row-parallel: its input is split over tensor-parallel ranks, else its output
    count: int = 1
    expert: bool = False


def linears(model: ModelSize, layer: int) -> list[Linear]:
    """The linear layers of a decoder layer that can have adapters."""
    hidden = model.hidden
    if model.delta is not None and layer in model.delta.layers:
        out = _delta(model, model.delta)
    elif model.latent is not None:
        out = _latent(model, model.latent)
    else:
        query, key = model.query_width, model.groups * model.head_dim
        out = [Linear(name=f"{n}_proj", inputs=hidden, outputs=size) for n, size in (("k", key), ("v", key))]
        out.append(Linear(name="q_proj", inputs=hidden, outputs=query * (2 if model.gated else 1)))
        out.append(Linear(name="o_proj", inputs=query, outputs=hidden, row=True))
    if not model.has_experts(layer):
        return out + _mlp(hidden, model.ffn)
    assert model.moe is not None
    shared = _mlp(hidden, model.moe.shared_ffn) if model.moe.shared_ffn else []
    return out + shared + _mlp(hidden, model.moe.ffn, count=model.moe.experts)


def _mlp(hidden: int, ffn: int, count: int = 1) -> list[Linear]:
    up = [Linear(name=f"{n}_proj", inputs=hidden, outputs=ffn, count=count, expert=count > 1) for n in ("gate", "up")]
    return [*up, Linear(name="down_proj", inputs=ffn, outputs=hidden, row=True, count=count, expert=count > 1)]


def _latent(model: ModelSize, a: Latent) -> list[Linear]:
    out = [
        Linear(name="kv_a_proj_with_mqa", inputs=model.hidden, outputs=a.kv_rank + a.rope_dim),
        Linear(name="kv_b_proj", inputs=a.kv_rank, outputs=model.heads * (a.nope_dim + a.v_dim)),
        Linear(name="o_proj", inputs=model.value_width, outputs=model.hidden, row=True),
    ]
    if a.q_rank is None:
        return [*out, Linear(name="q_proj", inputs=model.hidden, outputs=model.query_width)]
    down = Linear(name="q_a_proj", inputs=model.hidden, outputs=a.q_rank)
    return [*out, down, Linear(name="q_b_proj", inputs=a.q_rank, outputs=model.query_width)]


def _delta(model: ModelSize, d: Delta) -> list[Linear]:
    value = d.values * d.value_dim
    parts = {"in_proj_qkv": d.mixed, "in_proj_z": value, "in_proj_b": d.values, "in_proj_a": d.values}
    if model.architecture.startswith("Qwen3Next"):
        parts = {"in_proj_qkvz": d.mixed + value, "in_proj_ba": 2 * d.values}
    out = [Linear(name=name, inputs=model.hidden, outputs=size) for name, size in parts.items()]
    return [*out, Linear(name="out_proj", inputs=value, outputs=model.hidden, row=True)]


def _adapted(s: Settings, layer: int) -> list[Linear]:
    return [one for one in linears(s.model, layer) if not s.lora_targets or one.name in s.lora_targets]


def adapter_weights(s: Settings, layers: list[int]) -> tuple[int, int]:
    """(dense, expert) numbers of the factors A and B that one rank holds of `layers`: the factor on the split side of a layer is
    divided, the other is whole on each rank."""
    dense = expert = 0
    for layer in layers:
        for one in _adapted(s, layer):
            split, whole = (one.inputs, one.outputs) if one.row else (one.outputs, one.inputs)
            ranks = s.expert_tensor if one.expert else s.tensor
            numbers = s.lora_rank * (split // ranks + whole) * one.count
            dense, expert = (dense, expert + numbers // s.expert) if one.expert else (dense + numbers, expert)
    return dense, expert


def adapter_numbers(s: Settings, layer: int) -> float:
    """Numbers that the adapters of a layer keep for its backward pass, a token: A x, and with dropout their own input and its mask."""
    chosen = s.model.moe.chosen if s.model.moe is not None else 0
    out = 0.0
    for one in _adapted(s, layer):
        dropped = one.inputs / (s.tensor if one.row else 1) * (1 + 1 / s.param_bytes) if s.lora_dropout else 0.0
        out += (s.lora_rank + dropped) * (chosen if one.expert else 1)
    return out
