"""The nearest settings that fit: as few changes as possible, each offer checked by the plan's own arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from vime.plan.plan import refusals
from vime.plan.settings import Settings

__all__ = ["Offer", "offers"]

MOST_CHANGES = 4
MOST_TRIED = 20_000  # settings looked at before the search gives up
PER_NODE = 8  # tensor parallelism across nodes is too slow to offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Settings that fit, and what has to be said for them."""

    settings: Settings
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """Another value for one setting."""

    settings: Settings
    flags: str
    cost: float  # how much it slows a run down, roughly: offers with the same number of changes are sorted by it


def offers(s: Settings, count: int = 3, *, without: Collection[str] = ()) -> list[Offer]:
    """Up to `count` ways to make `s` fit, with the fewest changes there are; each of another set of settings.

    Empty when none is found. `without`: flags that are not to be offered.
    """
    tried = 0
    for size in range(1, MOST_CHANGES + 1):
        found: list[tuple[float, Offer]] = []
        kinds: set[tuple[int, ...]] = set()
        for moves in itertools.combinations(range(len(_MOVES)), size):
            for cost, flags, changed in _combined(s, moves):
                tried += 1
                if without and any(word in without for flag in flags for word in flag.split()):
                    continue
                if tried > MOST_TRIED:
                    return _best(found, count)
                if moves not in kinds and not refusals(changed):
                    kinds.add(moves)  # the mildest values of these settings; sharper ones are no further offer
                    found.append((cost, Offer(settings=changed, flags=flags)))
        if found:
            return _best(found, count)
    return []


def _best(found: list[tuple[float, Offer]], count: int) -> list[Offer]:
    return [offer for _, offer in sorted(found, key=lambda pair: pair[0])[:count]]


def _combined(s: Settings, moves: tuple[int, ...]) -> Iterator[tuple[float, tuple[str, ...], Settings]]:
    """All ways to apply these moves one after the other, mild values first."""
    if not moves:
        yield 0.0, (), s
        return
    for change in _MOVES[moves[0]](s):
        for cost, flags, changed in _combined(change.settings, moves[1:]):
            yield change.cost + cost, (change.flags, *flags), changed


def _recompute(s: Settings) -> Iterator[_Change]:
    if s.trains and s.recompute != "full":
        changed = replace(s, recompute="full", recompute_method="uniform", recompute_layers=1)
        flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        yield _Change(settings=changed, flags=flags, cost=1.3)


def _max_tokens(s: Settings) -> Iterator[_Change]:
    if not s.trains or s.max_tokens is None:
        return
    tokens, cost = s.max_tokens, 1.0
    floor = s.longest
    while tokens > floor:
        tokens, cost = max(floor, tokens // 2), cost + 0.2
        yield _Change(settings=replace(s, max_tokens=tokens), flags=f"--max-tokens-per-gpu {tokens}", cost=cost)


def _micro_batch(s: Settings) -> Iterator[_Change]:
    size, cost = s.micro_batch, 1.0
    while s.trains and s.max_tokens is None and size > 1:
        size, cost = size // 2, cost + 0.2
        yield _Change(settings=replace(s, micro_batch=size), flags=f"--micro-batch-size {size}", cost=cost)


def _doubled(s: Settings, field: str, flag: str, limit: int, cost: float) -> Iterator[_Change]:
    value = getattr(s, field)
    while value * 2 <= limit:
        value, cost = value * 2, cost + 0.3
        yield _Change(settings=replace(s, **{field: value}), flags=f"{flag} {value}", cost=cost)


def _tensor(s: Settings) -> Iterator[_Change]:
    if not s.trains:
        return
    for change in _doubled(s, "tensor", "--tensor-model-parallel-size", min(PER_NODE, s.trainers_per_node), 1.4):
        size = change.settings.tensor
        same = s.expert_tensor == s.tensor and s.model.moe is None
        changed = replace(change.settings, sequence=True, expert_tensor=size if same else s.expert_tensor)
        split = f" --expert-tensor-parallel-size {s.expert_tensor}" if s.model.moe is not None else ""
        yield _Change(settings=changed, flags=f"{change.flags} --sequence-parallel{split}", cost=change.cost)


def _pipeline(s: Settings) -> Iterator[_Change]:
    if s.trains and s.virtual == 1 and s.first_layers is None and s.last_layers is None:
        yield from _doubled(s, "pipeline", "--pipeline-model-parallel-size", s.world, 1.9)


def _context(s: Settings) -> Iterator[_Change]:
    if s.trains:
        yield from _doubled(s, "context", "--context-parallel-size", s.world, 1.7)


def _expert(s: Settings) -> Iterator[_Change]:
    if s.trains and s.model.moe is not None:
        yield from _doubled(s, "expert", "--expert-model-parallel-size", s.world, 1.2)


def _offload(s: Settings) -> Iterator[_Change]:
    if s.colocate and not s.offload_train:
        yield _Change(settings=replace(s, offload_train=True), flags="--offload-train", cost=1.1)
    if s.colocate and not s.offload_rollout:
        yield _Change(settings=replace(s, offload_rollout=True), flags="--offload-rollout", cost=1.1)
    if s.colocate and not s.offload_train and not s.offload_rollout:
        yield _Change(settings=replace(s, offload_train=True, offload_rollout=True), flags="--offload-train --offload-rollout", cost=1.2)


def _engine_gpus(s: Settings) -> Iterator[_Change]:
    if not s.generates or s.cpu:
        return
    total = s.rollout_gpus
    for change in _doubled(s, "engine_gpus", "--rollout-num-gpus-per-engine", min(total, s.machine.gpus_per_node), 1.3):
        gpus = change.settings.engine_gpus
        if total % gpus == 0:
            yield replace(change, settings=replace(change.settings, num_engines=total // gpus))


def _utilization(s: Settings) -> Iterator[_Change]:
    if not s.generates or s.cpu or s.kv_bytes is not None:
        return
    for value in (0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.95):
        if value != s.utilization:
            cost = 1.0 + 2 * abs(s.utilization - value)
            yield _Change(settings=replace(s, utilization=value), flags=f"--vllm-gpu-memory-utilization {value:g}", cost=cost)


def _cache(s: Settings) -> Iterator[_Change]:
    """Where the KV cache is given in bytes: as much as one longest sample needs, and multiples of it."""
    if not s.generates or s.kv_bytes is None:
        return
    mib = -(-int((s.longest + 128) * s.cache_bytes_per_token) // 2**20)
    for times in (16, 4, 1):
        num_bytes = mib * times * 2**20
        if num_bytes != s.kv_bytes:
            yield _Change(settings=replace(s, kv_bytes=num_bytes), flags=f"--vllm-kv-cache-memory-bytes {num_bytes}", cost=1.5 - times / 32)


def _engines(s: Settings) -> Iterator[_Change]:
    """On a CPU each engine takes its own memory of the same machine."""
    number = s.num_engines
    while s.cpu and s.generates and number > 1:
        number -= 1
        yield _Change(settings=replace(s, num_engines=number), flags=f"--rollout-num-gpus {number}", cost=1.6)


def _trainers(s: Settings) -> Iterator[_Change]:
    """On a CPU fewer trainers, on GPUs more nodes for the optimizer's state."""
    if not s.trains:
        return
    if s.cpu and s.world > 1:
        yield _Change(settings=replace(s, trainers_per_node=s.tensor * s.pipeline * s.context), flags=_per_node(s), cost=1.8)
    if not s.cpu and not s.colocate:
        for nodes in (2, 4, 8, 16, 32):
            if nodes > s.nodes:
                yield _Change(settings=replace(s, nodes=nodes), flags=f"--actor-num-nodes {nodes}", cost=3.0 + nodes)


def _per_node(s: Settings) -> str:
    return f"--actor-num-gpus-per-node {s.tensor * s.pipeline * s.context}"


def _bucket(s: Settings) -> Iterator[_Change]:
    size = s.bucket_bytes
    while s.trains and s.generates and size > 2**24:
        size //= 4
        yield _Change(settings=replace(s, bucket_bytes=size), flags=f"--update-weight-buffer-size {size}", cost=0.9)


def _chunk(s: Settings) -> Iterator[_Change]:
    if s.trains:
        for rows in (256, 64):
            yield _Change(settings=replace(s, log_probs_chunk=rows), flags=f"--log-probs-chunk-size {rows}", cost=1.0)


_MOVES: tuple[Callable[[Settings], Iterator[_Change]], ...] = (
    _max_tokens, _micro_batch, _recompute, _offload, _utilization, _cache, _bucket, _chunk, _expert, _tensor, _engine_gpus, _pipeline,
    _context, _engines, _trainers,
)  # fmt: skip
