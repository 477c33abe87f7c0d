"""PPO's critic beside the trainer: as many processes in the same places, rank by rank; the two take turns.

    critic.evaluate ──values──▶ policy.train ──returns──▶ critic.train_on

Values and returns go from rank to rank through Ray's object store; the driver sees metrics only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.config import RunConfig
from vime.ray.actor_group import RayTrainGroup
from vime.ray.placement_group import Placement
from vime.ray.supervisor import Supervisor
from vime.ray.train_actor import MegatronTrainRayActor
from vime.types import TrainBatch

if TYPE_CHECKING:
    import torch

    from vime.backends.megatron_utils.critic import MegatronCritic

__all__ = ["ActorCriticGroup", "CriticRayActor", "RayCriticGroup"]


class CriticRayActor(MegatronTrainRayActor):
    """Rank `rank` of the critic."""

    _values: list[list[torch.Tensor]]

    def _build(self, **where: Any) -> MegatronCritic:
        from vime.backends.megatron_utils.critic import MegatronCritic, critic_config

        return MegatronCritic(critic_config(self._config), **where)

    def evaluate(self, batch: TrainBatch) -> dict[str, float]:
        """Compute the values of this rank's share of a rollout step; `values` hands them out."""
        critic: Any = self.trainer
        self._values, metrics = critic.values(batch)
        return metrics

    def values(self) -> list[list[torch.Tensor]]:
        """What `evaluate` computed."""
        return self._values

    def train_on(self, batch: TrainBatch, returns: list[list[torch.Tensor]]) -> dict[str, float]:
        """Train on the step that `evaluate` saw. The metrics are the same on all ranks."""
        critic: Any = self.trainer
        return critic.train_on(batch, returns)


class RayCriticGroup(RayTrainGroup):
    """All ranks of the critic."""

    NAME = "critic"
    ACTOR = CriticRayActor
    CPUS = 0.0  # it shares the trainer's place, and works while that waits

    def evaluate(self, batch_refs: list[Any]) -> tuple[dict[str, float], list[Any]]:
        """(metrics, one reference to each rank's values)."""
        refs = [actor.evaluate.remote(batch) for actor, batch in zip(self._actors, self._shares(batch_refs), strict=True)]
        metrics = self._get(refs, "values", self._config.cluster.actor_deadline)[0]
        return metrics, [actor.values.remote() for actor in self._actors]

    def train_on(self, batch_refs: list[Any], returns: list[Any]) -> dict[str, float]:
        """One training step; `returns` holds one reference for each rank."""
        shares = self._shares(batch_refs)
        refs = [actor.train_on.remote(batch, mine) for actor, batch, mine in zip(self._actors, shares, returns, strict=True)]
        return self._get(refs, "train the critic", self._config.cluster.actor_deadline)[0]


class ActorCriticGroup(RayTrainGroup):
    """The policy's trainers with a critic: to the loop one trainer."""

    def __init__(self, config: RunConfig, placement: Placement, supervisor: Supervisor, log_dir: Path) -> None:
        super().__init__(config, placement, supervisor, log_dir)
        self._critic = RayCriticGroup(config, placement, supervisor, log_dir)

    def start(self, load: Path | None, resume: bool = True) -> None:
        """As the policy's; the critic's part of a commit is beside it. Another run's commit may have none: the critic then begins anew."""
        super().start(load, resume)
        mine = None if load is None else load.parent / "critic"
        self._critic.start(mine if mine is not None and (resume or mine.is_dir()) else None, resume)

    def ready(self) -> None:
        """Wait until every rank of both has its model."""
        super().ready()
        self._critic.ready()

    def train(self, batch_refs: list[Any]) -> dict[str, float]:
        """Values, advantages, both trained; in the first --num-critic-only-steps rollout steps the critic alone."""
        evaluated, values = self._critic.evaluate(batch_refs)
        shares = self._shares(batch_refs)
        refs = [actor.train.remote(batch, mine) for actor, batch, mine in zip(self._actors, shares, values, strict=True)]
        metrics = self._get(refs, "train", self._config.cluster.actor_deadline)[0]
        return evaluated | metrics | self._critic.train_on(batch_refs, [actor.returns.remote() for actor in self._actors])

    def writers(self) -> dict[str, Any]:
        """What writes each part of a commit."""
        return super().writers() | {"critic": self._critic.writers()["trainer"]}

    def shutdown(self) -> None:
        """End every rank of both; never raises."""
        super().shutdown()
        self._critic.shutdown()
