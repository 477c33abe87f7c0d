"""`RayTrainGroup`: the trainer processes as one. Calls go to every rank; the first failure ends the wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from vime.config import RunConfig
from vime.ray.placement_group import CPU_SHARE, Placement, gpu_share
from vime.ray.process import watched_actor
from vime.ray.supervisor import Supervisor
from vime.ray.train_actor import MegatronTrainRayActor
from vime.types import WeightSyncReport

__all__ = ["RayTrainGroup", "environment_options"]

SHUTDOWN_DEADLINE = 20.0
SYNC_GRACE = 30.0  # seconds in which the updater's own deadline error, which names the engine, is to arrive


class BackgroundSave:
    """The state of all ranks on its way to disk."""

    def __init__(self, group: RayTrainGroup) -> None:
        self._group, self._written = group, group.wait_saved()

    def is_written(self) -> bool:
        """Whether every rank has written its part, or failed to, which `finish` tells."""
        return len(ray.wait(self._written, num_returns=len(self._written), timeout=0)[0]) == len(self._written)

    def finish(self) -> None:
        """Wait for the ranks, and make the state complete. Raises what went wrong on any of them."""
        self._group.finish_save(self._written)


class RayTrainGroup:
    """All ranks of the trainer. `start` returns at once, `ready` waits: engines come up meanwhile."""

    NAME = "trainer"
    ACTOR: type = MegatronTrainRayActor
    CPUS = CPU_SHARE

    def __init__(self, config: RunConfig, placement: Placement, supervisor: Supervisor, log_dir: Path) -> None:
        self._config, self._supervisor = config, supervisor
        world = config.actor_world_size
        self.names = [f"{self.NAME} {rank}" for rank in range(world)]
        actor_class = watched_actor(self.ACTOR)
        self._actors = []
        for rank in range(world):
            log = log_dir / f"{self.NAME}_{rank}.log"
            options = {"num_cpus": self.CPUS, "num_gpus": gpu_share(config), "scheduling_strategy": placement.trainer(rank)}
            options |= environment_options(config)
            actor = actor_class.options(**options).remote(config, rank, world, str(log))
            self._actors.append(actor)
            supervisor.watch(self.names[rank], actor.watch.options(concurrency_group="watch").remote(), log)
        self._init_refs: list[Any] = []
        self._dp_ranks: list[int] = []
        self.num_parameters = 0

    def start(self, load: Path | None, resume: bool = True) -> None:
        """Begin building the model on every rank; `load` is a commit's trainer folder.

        With `resume` False only weights and optimizer moments are taken from it: schedule, random states and steps begin anew.
        """
        address, port = self._get([self._actors[0].rendezvous.remote()], "rendezvous", 120.0, names=self.names[:1])[0]
        self._init_refs = [actor.init.remote(address, port, str(load) if load else None, resume) for actor in self._actors]

    def ready(self) -> None:
        """Wait until every rank has its model."""
        infos = self._get(self._init_refs, "building the model", self._config.cluster.actor_deadline)
        self._dp_ranks = [info["data_parallel_rank"] for info in infos]
        self.num_parameters = infos[0]["num_parameters"]

    def async_train(self, batch_refs: list[Any]) -> list[Any]:
        """Begin one training step; batch_refs[d] is data-parallel rank d's share. Returns one reference per rank."""
        return [actor.train.remote(batch) for actor, batch in zip(self._actors, self._shares(batch_refs), strict=True)]

    def _shares(self, batch_refs: list[Any]) -> list[Any]:
        """Of each rank: its data-parallel rank's share."""
        return [batch_refs[d] for d in self._dp_ranks]

    def train(self, batch_refs: list[Any]) -> dict[str, float]:
        """One training step, waited for."""
        return self._get(self.async_train(batch_refs), "train", self._config.cluster.actor_deadline)[0]

    def give_back(self, *, weights: bool) -> None:
        """Have every rank give GPU memory back until the next step or save; the weights too where `weights`."""
        self._get([actor.give_back.remote(weights) for actor in self._actors], "give memory back", self._config.cluster.actor_deadline)

    def update_weights(self, version: int, engines: list[Any], probe: list[int], run_id: str) -> WeightSyncReport:
        """Send the weights to the engines as `version`; returns rank 0's report, proof included."""
        refs = [actor.update_weights.remote(version, engines, probe, run_id) for actor in self._actors]
        return self._get(refs, "weight sync", self._config.weight_update.update_weight_deadline + SYNC_GRACE)[0]

    def resend_weights(self, engines: list[Any], probe: list[int], run_id: str) -> Any:
        """Begin to send the engines what was sent last; a reference to the report, or to None when it was trained on meanwhile."""
        refs = [actor.update_weights.remote(None, engines, probe, run_id) for actor in self._actors]
        return refs[0]

    def save(self, path: str) -> None:
        """Write the trainer's part of a commit."""
        self._get([actor.save.remote(path) for actor in self._actors], "save", self._config.cluster.actor_deadline)

    def start_save(self, path: str) -> BackgroundSave:
        """Begin to write the trainer's part of a commit: its copy is taken on return."""
        self._get([actor.start_save.remote(path) for actor in self._actors], "take the state to save", self._config.cluster.actor_deadline)
        return BackgroundSave(self)

    def finish_save(self, written: list[Any]) -> None:
        """Wait for what `start_save` began, and make it complete."""
        deadline = self._config.cluster.actor_deadline
        self._get(written, "write the state to disk", deadline)
        self._get([actor.finish_save.remote() for actor in self._actors], "end the save", deadline)

    def wait_saved(self) -> list[Any]:
        """One reference per rank to the end of its writing."""
        return [actor.wait_saved.options(concurrency_group="save").remote() for actor in self._actors]

    def writers(self) -> dict[str, Any]:
        """What writes each part of a commit."""
        return {"trainer": self.start_save if self._config.checkpoint.async_save else self.save}

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face folder."""
        self._get([actor.save_hf.remote(path) for actor in self._actors], "save_hf", self._config.cluster.actor_deadline)

    def shutdown(self) -> None:
        """End every rank; never raises."""
        refs = [actor.shutdown.remote() for actor in self._actors]
        ray.wait(refs, num_returns=len(refs), timeout=SHUTDOWN_DEADLINE)
        for actor in self._actors:
            ray.kill(actor)

    def _get(self, refs: list[Any], phase: str, deadline: float, names: list[str] | None = None) -> list[Any]:
        return self._supervisor.get(refs, names=names or self.names, phase=phase, deadline=deadline)


def environment_options(config: RunConfig) -> dict[str, Any]:
    """Actor options that put --train-env-vars into a trainer process's environment before it loads anything."""
    variables = config.cluster.train_env_vars
    return {"runtime_env": {"env_vars": dict(variables)}} if variables else {}
