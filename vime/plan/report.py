"""A plan as text for people, and as plain values for programs."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from vime.plan.footprint import Footprint, Item, total
from vime.plan.plan import Plan
from vime.plan.search import Offer

__all__ = ["as_json", "as_text"]

GIB, MIB = 2**30, 2**20
SHOWN = 4  # processes of one role listed one by one


def as_text(plan: Plan, offers: Sequence[Offer], not_runnable: Sequence[str]) -> str:
    """The plan for people."""
    lines = [*_head(plan), "", *_processes(plan), "", *_memory(plan), "", *_batches(plan)]
    if plan.cache is not None:
        lines += ["", *_cache(plan)]
    lines += ["", *_assumed(plan)]
    if plan.advice:
        lines += ["", "advice", *(f"  {line}" for line in plan.advice)]
    if not_runnable:
        lines += ["", *(f"not runnable yet: {line}" for line in not_runnable)]
    lines.append("")
    if not plan.refusals:
        lines.append("It fits.")
        return "\n".join(lines)
    lines += ["It does not fit:", *(f"  {line}" for line in plan.refusals)]
    if offers:
        lines += ["The nearest settings that fit:", *(f"  {number}. {'  '.join(o.flags)}" for number, o in enumerate(offers, 1))]
    else:
        lines.append("Nothing near it fits: use larger devices, more of them, or a smaller model.")
    return "\n".join(lines)


def as_json(plan: Plan, offers: Sequence[Offer], not_runnable: Sequence[str]) -> dict[str, Any]:
    """The plan for programs: plain values, sizes in bytes, times in seconds."""
    s = plan.settings
    return {
        "fits": not plan.refusals,
        "refusals": plan.refusals,
        "offers": [list(offer.flags) for offer in offers],
        "advice": plan.advice,
        "not_runnable_yet": list(not_runnable),
        "model": {
            "architecture": s.model.architecture,
            "parameters": s.model.parameters,
            "active_parameters": s.model.active_parameters,
        },
        "machine": dataclasses.asdict(s.machine),
        "processes": [dataclasses.asdict(process) for process in plan.processes],
        "devices": [_footprint(footprint) for footprint in plan.devices],
        "hosts": [_footprint(footprint) for footprint in plan.hosts],
        "shared_memory": plan.shared_memory,
        "batches": dataclasses.asdict(plan.batches),
        "kv_cache": None if plan.cache is None else dataclasses.asdict(plan.cache),
        "weight_sync": None if plan.sync is None else dataclasses.asdict(plan.sync),
        "assumed": {"mean_prompt_len": s.mean_prompt, "mean_response_len": s.mean_response, "longest_sample": s.longest},
    }


def _footprint(footprint: Footprint) -> dict[str, Any]:
    return {
        "where": footprint.where,
        "what": footprint.what,
        "count": footprint.count,
        "capacity": footprint.capacity,
        "peak": footprint.peak,
        "peak_phase": footprint.peak_phase,
        "phases": {phase: [dataclasses.asdict(item) for item in items] for phase, items in footprint.phases.items()},
    }


def _head(plan: Plan) -> Iterator[str]:
    s = plan.settings
    active = "" if s.model.moe is None else f", {_count(s.model.active_parameters)} active"
    yield f"{s.model.architecture}, {_count(s.model.parameters)} parameters{active}; {_sized(s.machine.device_bytes)} {_device(plan)}"
    if s.trains:
        parts = [("TP", s.tensor), ("CP", s.context), ("PP", s.pipeline), ("DP", s.data)]
        if s.model.moe is not None:
            parts += [("EP", s.expert), ("expert TP", s.expert_tensor)]
        sizes = " x ".join(f"{name} {size}" for name, size in parts)
        who = "trainer and critic" if s.critic else "trainer"
        yield f"{who}: {s.world} rank{_s(s.world)}, {sizes}; {s.param_bytes * 8}-bit weights, recompute {s.recompute}"
    if s.generates:
        yield f"engines: {s.num_engines} x {s.engine_gpus} {'process' if s.cpu else 'GPU'}{'es' * (s.cpu and s.engine_gpus > 1)}" + (
            ", on the trainer's GPUs" if s.colocate else ""
        )


def _device(plan: Plan) -> str:
    s = plan.settings
    return "of memory for all processes (CPU)" if s.cpu else f"a GPU ({s.machine.device}), {s.machine.gpus_per_node} a node"


def _processes(plan: Plan) -> Iterator[str]:
    yield "processes"
    for _, group in itertools.groupby(plan.processes, key=lambda process: process.role):
        same = list(group)
        shown = same if len(same) <= SHOWN else same[: SHOWN - 1]
        for process in shown:
            gpus = "" if not process.gpus else f", GPU {_range(process.gpus)}"
            place = " ".join(f"{name}{number}" for name, number in process.coordinates.items())
            yield f"  {process.name:<16} node {process.node}{gpus}{'   ' + place if place else ''}"
        if len(same) > len(shown):
            yield f"  ... to {same[-1].name} (--json lists all)"


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _memory(plan: Plan) -> Iterator[str]:
    for footprint in [*plan.devices, *plan.hosts]:
        room = "" if footprint.capacity is None else f" of {_sized(footprint.capacity)}"
        each = " each" if footprint.count > 1 else ""
        when = f", in {footprint.peak_phase}" if len(footprint.phases) > 1 else ""
        verdict = "  <- TOO MUCH" if footprint.excess else ""
        yield f"{footprint.where} ({footprint.what}): peak {_sized(footprint.peak)}{room}{each}{when}{verdict}"
        yield from _table(footprint)
    parts = ", ".join(f"{name} {_sized(size)}" for name, size in plan.shared_memory.items())
    yield f"/dev/shm of a node: {parts}"


def _table(footprint: Footprint) -> Iterator[str]:
    """One row an item, one column a phase."""
    rows: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for phase, items in footprint.phases.items():
        for item in items:
            rows[item.role, item.name][phase] += item.num_bytes
    phases = list(footprint.phases)
    yield "    " + " " * 44 + "".join(f"{phase:>12}" for phase in phases)
    for (role, name), sizes in rows.items():
        yield f"    {role + ': ' + name:<44}" + "".join(f"{_sized(sizes[p]) if p in sizes else '-':>12}" for p in phases)
    yield f"    {'total':<44}" + "".join(f"{_sized(total(list[Item](footprint.phases[p]))):>12}" for p in phases)


def _batches(plan: Plan) -> Iterator[str]:
    s, b = plan.settings, plan.batches
    yield "batches"
    yield f"  {b.groups} prompts x {s.samples} = {b.samples} samples a rollout step, {b.tokens:,} tokens ({b.most_tokens:,} at most)"
    if not s.trains:
        return
    low, high = b.samples_per_rank
    share = f"{low}" if low == high else f"{low} or {high} (the fullest has {b.imbalance:.0%} more than the mean)"
    run = "" if b.total_steps is None else f", {b.total_steps} in the run"
    yield f"  {b.steps} optimizer step{_s(b.steps)} of {b.samples_per_step} samples{run}"
    yield f"  samples a data-parallel rank and step: {share}"
    bubble = f"; pipeline bubble {b.bubble:.0%}" if s.pipeline > 1 else ""
    yield f"  {b.micro_batches} micro-batch{'es' * (b.micro_batches > 1)} a rank and step ({b.most_micro_batches} at most){bubble}"
    if plan.sync is not None:
        sync = plan.sync
        yield (
            f"  weight sync: {_sized(sync.num_bytes)} to each of {sync.engines} engine{_s(sync.engines)}, about {sync.seconds:.2g} s "
            f"at {sync.bytes_per_s / 1e9:g} GB/s (--sync-bandwidth)"
        )


def _cache(plan: Plan) -> Iterator[str]:
    c = plan.cache
    assert c is not None
    yield "KV cache of one engine"
    yield f"  {c.tokens:,} tokens ({_sized(plan.settings.cache_bytes_per_token)} a token and GPU)"
    held = f"{c.longest_sequences} of the longest sequences, {c.mean_sequences} of mean length"
    yield f"  {held}; a rollout step has {c.wanted} for it at once"


def _assumed(plan: Plan) -> Iterator[str]:
    s = plan.settings
    yield "assumed"
    yield f"  prompts of {s.mean_prompt} and responses of {s.mean_response} tokens in the mean (--mean-prompt-len, --mean-response-len)"
    yield f"  samples of {s.longest} tokens at most; experts are used evenly" if s.model.moe else f"  samples of {s.longest} tokens at most"


def _count(number: float) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _sized(num_bytes: float) -> str:
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    if num_bytes >= MIB:
        return f"{num_bytes / MIB:.0f} MiB"
    return f"{num_bytes / 1024:.1f} KiB"


def _s(count: int) -> str:
    return "s" * (count != 1)
