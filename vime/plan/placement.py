"""Which process runs where, and what each device and each node's memory holds in each phase."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vime.plan import engine, trainer
from vime.plan.batches import batches
from vime.plan.devices import MIB, PROGRAMS_CPU, PROGRAMS_GPU
from vime.plan.footprint import Footprint, Item, total
from vime.plan.settings import Settings

__all__ = ["OBJECT_STORE_BYTES", "Process", "devices", "hosts", "processes", "shared_memory"]

OBJECT_STORE_BYTES = 256 * MIB  # of Ray's object store in a cluster that a run starts itself (vime/ray/cluster.py)
PHASES = ("train", "rollout", "sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process: its node, and its GPUs there (on a CPU: none)."""

    role: str
    name: str
    node: int
    gpus: tuple[int, ...] = ()
    coordinates: dict[str, int] = field(default_factory=dict)  # of a trainer rank


def processes(s: Settings) -> list[Process]:
    """Every process of the run, Ray's own left out."""
    out = [Process(role="driver", name="driver", node=0), Process(role="manager", name="rollout manager", node=0)]
    if s.generates:
        out.append(Process(role="router", name="router", node=0))
        out += [Process(role="engine", name=f"engine {i}", node=places[0][0], gpus=gpus_of(s, places)) for i, places in _engines(s)]
    if s.trains:
        for role in ("trainer", "critic") if s.critic else ("trainer",):
            for rank in range(s.world):
                node, gpu = divmod(rank, s.trainers_per_node)
                gpus = () if s.cpu else (gpu,)
                out.append(Process(role=role, name=f"{role} {rank}", node=node, gpus=gpus, coordinates=coordinates(s, rank)))
    return out


def coordinates(s: Settings, rank: int) -> dict[str, int]:
    """A rank's place in Megatron's order tp-cp-ep-dp-pp: tensor ranks are neighbours, pipeline stages far apart."""
    rest, tensor = divmod(rank, s.tensor)
    rest, context = divmod(rest, s.context)
    stage, data = divmod(rest, s.data)
    out = {"tp": tensor, "cp": context, "dp": data, "pp": stage}
    if s.model.moe is not None:
        out["ep"] = rank // s.expert_tensor % s.expert
    return out


def gpus_of(s: Settings, places: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """GPU numbers on the first node of (node, GPU) places."""
    return () if s.cpu else tuple(gpu for node, gpu in places if node == places[0][0])


def _engines(s: Settings) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """(engine, its (node, GPU) places): on the trainer's GPUs, or on the next free ones, an engine on one node where it has room."""
    if s.cpu:
        yield from ((i, [(0, 0)] * s.engine_gpus) for i in range(s.num_engines))
        return
    if s.colocate:
        free = (divmod(gpu, s.trainers_per_node) for gpu in itertools.count())
    else:
        used = s.trainers_per_node if s.trains else 0
        free = ((node, gpu) for node in itertools.count() for gpu in range(used if node < s.nodes else 0, s.machine.gpus_per_node))
    whole = s.engine_gpus <= (s.trainers_per_node if s.colocate else s.machine.gpus_per_node)
    for i in range(s.num_engines):
        places = [next(free)]
        while len(places) < s.engine_gpus:
            place = next(free)
            places = [place] if whole and place[0] != places[0][0] else [*places, place]
        yield i, places


# --- devices ---


def devices(s: Settings) -> list[Footprint]:
    """What each kind of device holds, phase by phase."""
    if s.cpu:
        return [_machine(s)]
    stages = [
        Footprint(
            where=_gpus(s, stage),
            what="trainer" + (f", pipeline stage {stage}" if s.pipeline > 1 else "") + (" and engine" if s.colocate else ""),
            count=s.world // s.pipeline,
            capacity=s.machine.device_bytes,
            phases=_shared(s, stage) if s.colocate else _trainer_alone(s, stage),
        )
        for stage in range(s.pipeline if s.trains else 0)
    ]
    if not s.generates:
        return stages
    over = s.rollout_gpus - s.world if s.colocate else s.rollout_gpus
    if over > 0:
        items = [_context("engine"), *engine.awake(s)]
        bucket = Item(role="engine", name="sync bucket", num_bytes=trainer.sync_bucket(s) if s.trains else 0)
        phases = {"rollout": items, "sync": [*items, bucket]} if s.trains else {"rollout": items}
        where = f"{over} GPUs"
        stages.append(Footprint(where=where, what="engine", count=over, capacity=s.machine.device_bytes, phases=phases))
    return stages


def _gpus(s: Settings, stage: int) -> str:
    per_stage = s.world // s.pipeline
    first = stage * per_stage
    return f"GPU {first}" if per_stage == 1 else f"GPU {first}-{first + per_stage - 1}"


def _context(role: str) -> Item:
    size = PROGRAMS_GPU.engine_device if role == "engine" else PROGRAMS_GPU.trainer_device
    return Item(role=role, name="CUDA context, communicators", num_bytes=size)


def _trainer_contexts(s: Settings) -> list[Item]:
    return [_context(role) for role in (("trainer", "critic") if s.critic else ("trainer",))]


def _trainer_alone(s: Settings, stage: int) -> dict[str, list[Item]]:
    always = [*_trainer_contexts(s), *trainer.held(s, stage)]
    out = {"train": always + trainer.train_items(s, stage)}
    if s.generates:
        out |= {"rollout": always, "sync": always + trainer.sync_items(s, stage)}
    return out


def _shared(s: Settings, stage: int) -> dict[str, list[Item]]:
    """Trainer and engine on one GPU, each moved aside while the other works."""
    held = trainer.held(s, stage)
    weights = [item for item in held if item.name == "weights" and item.role == "trainer"]
    awake = engine.awake(s)
    asleep = [item for item in awake if item.name == "CUDA graphs"] if s.offload_rollout else awake
    loaded = [item for item in awake if item.name != "KV cache"] if s.offload_rollout else awake
    base = [*_trainer_contexts(s), _context("engine")]
    return {
        "train": [*base, *held, *trainer.train_items(s, stage), *asleep],
        "rollout": [*base, *([] if s.offload_train else held), *awake],
        "sync": [*base, *(weights if s.offload_train else held), *trainer.sync_items(s, stage), *loaded],
    }


# --- host memory ---


def _programs(s: Settings, node: int) -> list[Item]:
    """What the programs of a node take with an empty model."""
    known = PROGRAMS_CPU if s.cpu else PROGRAMS_GPU
    here = [process for process in processes(s) if process.node == node]
    sizes = {"driver": known.driver, "manager": known.manager, "router": known.router, "trainer": known.trainer, "critic": known.trainer}
    sizes["engine"] = known.engine + (s.engine_gpus - 1) * known.engine_worker
    items = [Item(role="ray", name="programs", num_bytes=known.ray)]
    for role in ("driver", "manager", "router", "engine", "trainer", "critic"):
        count = sum(process.role == role for process in here)
        if count:
            items.append(Item(role=role, name="programs", num_bytes=count * sizes[role]))
    return items


def _machine(s: Settings) -> Footprint:
    """On a CPU all processes share one memory, and nothing is moved aside."""
    always = _programs(s, 0)
    b = batches(s)
    always.append(Item(role="ray", name="batch in the object store", num_bytes=min(b.object_bytes, OBJECT_STORE_BYTES)))
    if s.trains:
        always += [_times(item, s.world // s.pipeline) for stage in range(s.pipeline) for item in trainer.held(s, stage)]
    if s.saves_behind:
        always.append(_saved(s, [stage for stage in range(s.pipeline) for _ in range(s.world // s.pipeline)]))
    if s.generates:
        always += [_times(item, s.num_engines * s.engine_gpus) for item in engine.awake(s)]
    phases = {"rollout": always}
    if s.trains:
        used = [_times(item, s.world // s.pipeline) for stage in range(s.pipeline) for item in trainer.train_items(s, stage)]
        phases["train"] = always + used
        if s.generates:
            segment = Item(role="shared memory", name="weight bucket", num_bytes=trainer.sync_bucket(s))
            phases["sync"] = [*always, *trainer.sync_items(s, 0), segment]
    return Footprint(where="this machine", what="all processes", count=1, capacity=s.machine.device_bytes, phases=phases)


def _times(item: Item, count: int) -> Item:
    return Item(role=item.role, name=item.name, num_bytes=item.num_bytes * count)


def _saved(s: Settings, stages: list[int]) -> Item:
    """The copy of what processes of these pipeline stages save."""
    copies = sum(total([i for i in trainer.held(s, stage) if i.name in ("weights", "optimizer")]) for stage in stages)
    return Item(role="trainer", name="checkpoint being written", num_bytes=copies)


def hosts(s: Settings, *, exports: bool, saves: bool) -> list[Footprint]:
    """Host memory of each node with GPUs (on a CPU the one footprint of `devices` says it all)."""
    if s.cpu:
        return []
    out = []
    for node in sorted({process.node for process in processes(s)}):
        items = _programs(s, node)
        here = [p for p in processes(s) if p.node == node and p.role == "trainer"]
        stages = [p.coordinates["pp"] for p in here]
        if s.colocate and s.offload_train:
            moved = sum(total([i for i in trainer.held(s, stage) if i.name != "gradients"]) for stage in stages)
            items.append(Item(role="trainer", name="offloaded state (pinned)", num_bytes=moved))
        if s.roles and here:
            waiting = sum(trainer.role_weights(s, stage).num_bytes for stage in stages)
            items.append(Item(role="trainer", name="weights of other roles (pinned)", num_bytes=waiting))
        if saves and here:
            items.append(_saved(s, stages))
        if exports and node == 0:
            items.append(Item(role="trainer", name="Hugging Face folder being written", num_bytes=s.model.parameters * s.param_bytes))
        if node == 0:
            items.append(Item(role="ray", name="batch in the object store", num_bytes=batches(s).object_bytes))
        out.append(Footprint(where=f"node {node}", what="host memory", count=1, capacity=s.machine.host_bytes, phases={"peak": items}))
    return out


def shared_memory(s: Settings) -> dict[str, int]:
    """Bytes in /dev/shm by what they are."""
    out = {"Ray's object store": OBJECT_STORE_BYTES if s.cpu else max(OBJECT_STORE_BYTES, batches(s).object_bytes)}
    if s.cpu and s.trains and s.generates:
        out["weight bucket"] = trainer.sync_bucket(s)
    return out
