"""Memory of one GPU (or CPU process) of an engine, and what its KV cache holds."""

from __future__ import annotations

from dataclasses import dataclass

from vime.plan.devices import GIB, PROGRAMS_GPU
from vime.plan.footprint import Item
from vime.plan.settings import KV_BLOCK, KV_BLOCK_CPU, Settings

__all__ = ["Cache", "awake", "cache", "engine_weights", "graphs"]

ROLE = "engine"
GRAPH_BYTES = int(0.75 * GIB)  # of captured CUDA graphs; assumed, vLLM measures it at start


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The KV cache of one engine."""

    num_bytes: int  # on each GPU
    tokens: int
    longest_sequences: int  # that it holds at once
    mean_sequences: int
    wanted: int  # sequences that a rollout step has for one engine at once


def engine_weights(s: Settings) -> int:
    """Bytes of weights on one GPU of an engine."""
    return s.model.parameters * s.engine_param_bytes // s.engine_gpus


def graphs(s: Settings) -> int:
    """Bytes of CUDA graphs."""
    return GRAPH_BYTES if s.graphs else 0


def workspace(s: Settings) -> int:
    """Activations of the largest batch of tokens and float32 logits of all sequences, which vLLM sets aside at start."""
    model = s.model
    wide = max(3 * model.ffn, (model.moe.chosen * 3 * model.moe.ffn) if model.moe is not None else 0) / s.engine_gpus
    tokens = s.batched_tokens * int(wide + 4 * model.hidden) * s.engine_param_bytes
    return tokens + 3 * s.max_seqs * model.vocab * 4


def cache(s: Settings) -> Cache:
    """What is left for the KV cache, and what it holds."""
    if s.kv_bytes is not None:
        num_bytes = s.kv_bytes
    else:
        num_bytes = int(s.utilization * s.machine.device_bytes) - engine_weights(s) - workspace(s) - graphs(s) - PROGRAMS_GPU.engine_device
    block = KV_BLOCK_CPU if s.cpu else KV_BLOCK
    tokens = max(0, int(num_bytes / s.cache_bytes_per_token)) // block * block

    def held(length: int) -> int:
        padded = -(-length // block) * block
        return max(0, int(num_bytes / (padded * s.cache_bytes_per_token + s.state_bytes_per_sequence)))

    samples = -(-s.prompts * s.samples // max(1, s.num_engines))
    return Cache(
        num_bytes=num_bytes,
        tokens=tokens,
        longest_sequences=held(s.longest),
        mean_sequences=held(s.mean_prompt + s.mean_response),
        wanted=min(samples, s.max_seqs, s.concurrency),
    )


def awake(s: Settings) -> list[Item]:
    """Everything that an engine's GPU holds while it generates, without its context."""
    return [
        _item("weights", engine_weights(s)),
        _item("KV cache", max(0, cache(s).num_bytes)),
        *([] if s.cpu else [_item("workspace", workspace(s)), _item("CUDA graphs", graphs(s))]),
    ]


def _item(name: str, num_bytes: int) -> Item:
    return Item(role=ROLE, name=name, num_bytes=num_bytes)
