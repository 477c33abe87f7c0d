"""Placement: one Ray placement group for the run. On CPU a trainer and an engine share a core and take turns.

On GPUs each has one of its own; with --colocate trainer i and engine i share one.
"""

from __future__ import annotations

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vime.config import RunConfig
from vime.errors import ResourceError

__all__ = ["Placement", "create_placement_groups", "gpu_share"]

CPU_SHARE = 0.5  # of a core, for a trainer or an engine: two that take turns share one
READY_DEADLINE = 60.0


class Placement:
    """The bundles of a run: trainers first, then engines; `shared`: bundle i is that of trainer i and of engine i."""

    def __init__(self, group: PlacementGroup | None, num_trainers: int, num_engines: int, *, shared: bool = False) -> None:
        self._group, self.num_trainers, self.num_engines, self._shared = group, num_trainers, num_engines, shared

    def trainer(self, rank: int) -> PlacementGroupSchedulingStrategy:
        """Where trainer `rank` goes."""
        return self._bundle(rank)

    def engine(self, index: int) -> PlacementGroupSchedulingStrategy:
        """Where engine `index` goes."""
        return self._bundle(index if self._shared else self.num_trainers + index)

    def remove(self) -> None:
        """Give the bundles back (matters on a cluster that was only joined)."""
        if self._group is not None:
            remove_placement_group(self._group)

    def _bundle(self, index: int) -> PlacementGroupSchedulingStrategy:
        assert self._group is not None
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)


def create_placement_groups(config: RunConfig) -> Placement:
    """Reserve one bundle per trainer and per engine; ResourceError when the cluster has no room for them."""
    trainers = 0 if config.debug.debug_rollout_only else config.actor_world_size
    engines = config.num_own_engines
    if trainers + engines == 0:
        return Placement(None, 0, 0)
    shared, on_gpu = config.cluster.colocate, config.cluster.device == "cuda"
    bundle = {"CPU": CPU_SHARE * (2 if shared else 1)} | ({"GPU": 1.0} if on_gpu else {})
    count = max(trainers, engines) if shared else trainers + engines
    have = ray.cluster_resources()
    if on_gpu and have.get("GPU", 0.0) < count:
        raise ResourceError(
            f"{trainers} trainers and {engines} engines need {count} GPUs, and Ray sees {have.get('GPU', 0.0):g}. "
            + ("Ask for fewer." if shared else "Ask for fewer, or let them share their GPUs: --colocate.")
        )
    group = placement_group([bundle] * count, strategy="PACK")
    if not group.wait(READY_DEADLINE):
        free = ray.available_resources()
        remove_placement_group(group)
        raise ResourceError(
            f"the Ray cluster has no room for {trainers} trainers and {engines} engines, which need "
            + ", ".join(f"{amount * count:g} {name}s" for name, amount in bundle.items())
            + f": it has {', '.join(f'{have.get(name, 0.0):g} {name}s, of which {free.get(name, 0.0):g} are free' for name in bundle)}. "
            "Ask for fewer, or end what else runs there."
        )
    return Placement(group, trainers, engines, shared=shared)


def gpu_share(config: RunConfig) -> float:
    """Of a GPU, for a trainer or an engine."""
    if config.cluster.device == "cpu":
        return 0.0
    return 0.5 if config.cluster.colocate else 1.0
