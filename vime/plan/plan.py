"""`make_plan`: the whole plan of a run; `refusals`: why a run cannot fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vime.plan import engine
from vime.plan.batches import Batches, batches
from vime.plan.devices import GIB
from vime.plan.footprint import Footprint, Item
from vime.plan.placement import OBJECT_STORE_BYTES, Process, devices, hosts, processes, shared_memory
from vime.plan.settings import Settings, layout_problems

__all__ = ["Plan", "Sync", "make_plan", "refusals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """One weight sync, expected."""

    num_bytes: int  # to one engine
    engines: int
    bytes_per_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that `vime plan` says."""

    settings: Settings
    processes: list[Process]
    devices: list[Footprint]
    hosts: list[Footprint]
    shared_memory: dict[str, int]
    batches: Batches
    cache: engine.Cache | None
    sync: Sync | None
    refusals: list[str]
    advice: list[str]


def make_plan(s: Settings, *, exports: bool = False, saves: bool = False) -> Plan:
    """The plan of `s`. `exports`: --save-hf is given; `saves`: --save is."""
    memory = hosts(s, exports=exports, saves=saves)
    size = s.model.parameters * s.param_bytes
    sync = None
    if s.trains and s.generates:
        seconds = s.machine.sync_overhead_s + size / s.machine.sync_bytes_per_s
        sync = Sync(num_bytes=size, engines=s.num_engines, bytes_per_s=s.machine.sync_bytes_per_s, seconds=seconds)
    return Plan(
        settings=s,
        processes=processes(s),
        devices=devices(s),
        hosts=memory,
        shared_memory=shared_memory(s),
        batches=batches(s),
        cache=engine.cache(s) if s.generates else None,
        sync=sync,
        refusals=refusals(s) + [_too_much(footprint) for footprint in memory if footprint.excess],
        advice=[*_batch_advice(s), *([engine_advice(s)] if s.generates else [])],
    )


def refusals(s: Settings) -> list[str]:
    """Why `s` cannot run on its machines; empty when it fits. Says what is too large, by how much, and the largest item."""
    if problems := layout_problems(s):
        return problems
    too_large = [footprint for footprint in devices(s) if footprint.excess]
    out = []
    if s.generates:
        cache = engine.cache(s)
        if cache.num_bytes <= 0:
            too_large = [footprint for footprint in too_large if footprint.what != "engine"]  # the next lines say it better
            out.append(
                f"engine: --vllm-gpu-memory-utilization {s.utilization:g} of {_gib(s.machine.device_bytes)} is "
                f"{_gib(-cache.num_bytes)} too little for weights and workspace. Largest item: engine weights, "
                f"{_gib(engine.engine_weights(s))}."
            )
        elif cache.longest_sequences < 1:
            out.append(
                f"engine: the KV cache of {_gib(cache.num_bytes)} holds {cache.tokens} tokens, fewer than the longest sample has "
                f"({s.longest}); vLLM does not start so."
            )
    out += [_too_much(footprint) for footprint in too_large]
    shm = sum(shared_memory(s).values())
    if s.machine.shm_bytes is not None and shm > s.machine.shm_bytes:
        out.append(
            f"/dev/shm holds {_gib(s.machine.shm_bytes)}, the run needs {_gib(shm)} there: lower --update-weight-buffer-size, "
            "or give the container more (docker run --shm-size=...)."
        )
    return out


def _too_much(footprint: Footprint) -> str:
    assert footprint.capacity is not None
    item: Item = footprint.largest
    return (
        f"{footprint.where} ({footprint.what}): needs {_gib(footprint.peak)} in the {footprint.peak_phase} phase and has "
        f"{_gib(footprint.capacity)}: {_gib(footprint.excess)} too little. Largest item: {item.role} {item.name}, {_gib(item.num_bytes)}."
    )


def _batch_advice(s: Settings) -> list[str]:
    b, out = batches(s), []
    if s.trains and b.idle_ranks:
        out.append(f"{b.idle_ranks} of {s.data} data-parallel ranks have no sample in a step of {b.samples_per_step}: raise the batch.")
    if s.trains and s.max_tokens is not None and s.longest > s.max_tokens:
        out.append(
            f"Samples can be longer ({s.longest} tokens) than the budget of a micro-batch ({s.max_tokens}): each such has a "
            "micro-batch of its own, and the memory above counts it."
        )
    if b.object_bytes > OBJECT_STORE_BYTES and s.cpu:
        out.append(f"A rollout step of the longest samples ({_gib(b.object_bytes)}) is larger than Ray's object store: it spills to disk.")
    return out


def engine_advice(s: Settings) -> str:
    """Which --rollout-num-gpus-per-engine is right, and why."""
    total = s.rollout_gpus
    if s.cpu:
        keep = "right as it is" if s.engine_gpus == 1 else f"better than {s.engine_gpus}"
        return f"--rollout-num-gpus-per-engine 1 is {keep}: on a CPU an engine has one worker; more engines share the work."
    for gpus in (1, 2, 4, 8, 16):
        if total % gpus:
            continue
        tried = replace(s, engine_gpus=gpus, num_engines=total // gpus)
        if layout_problems(tried) or engine.cache(tried).longest_sequences < 1:
            continue
        cache = engine.cache(tried)
        if cache.mean_sequences >= cache.wanted or gpus * 2 > total:
            share = f"its KV cache holds {cache.mean_sequences} sequences of mean length ({cache.longest_sequences} of the longest)"
            reason = f"the smallest engine that holds the {cache.wanted} sequences that a step has for it: {share}"
            if cache.mean_sequences < cache.wanted:
                reason = f"{share}, of {cache.wanted} that a step has for it: they wait in turn"
            keep = "right as it is" if gpus == s.engine_gpus else f"better than {s.engine_gpus}"
            return f"--rollout-num-gpus-per-engine {gpus} is {keep}: {reason}. Engines scale better than tensor parallelism."
    return f"No engine of up to {total} GPUs holds one sample of {s.longest} tokens."


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.0f} MiB"
