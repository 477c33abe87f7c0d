"""Placement: one Ray placement group for the run. On CPU a trainer and an engine share a core and take turns."""

from __future__ import annotations

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vime.config import RunConfig
from vime.errors import ResourceError

__all__ = ["Placement", "create_placement_groups"]

CPU_SHARE = 0.5  # of a core, for a trainer or an engine: two that take turns share one
READY_DEADLINE = 60.0


class Placement:
    """The bundles of a run: trainers first, then engines."""

    def __init__(self, group: PlacementGroup | None, num_trainers: int, num_engines: int) -> None:
        self._group, self.num_trainers, self.num_engines = group, num_trainers, num_engines

    def trainer(self, rank: int) -> PlacementGroupSchedulingStrategy:
        """Where trainer `rank` goes."""
        return self._bundle(rank)

    def engine(self, index: int) -> PlacementGroupSchedulingStrategy:
        """Where engine `index` goes."""
        return self._bundle(self.num_trainers + index)

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
    group = placement_group([{"CPU": CPU_SHARE}] * (trainers + engines), strategy="PACK")
    if not group.wait(READY_DEADLINE):
        have = ray.cluster_resources().get("CPU", 0.0)
        free = ray.available_resources().get("CPU", 0.0)
        remove_placement_group(group)
        raise ResourceError(
            f"the Ray cluster has no room for {trainers} trainers and {engines} engines, "
            f"which need {CPU_SHARE * (trainers + engines):g} CPUs: it has {have:g}, of which {free:g} are free. "
            "Ask for fewer, or end what else runs there."
        )
    return Placement(group, trainers, engines)
