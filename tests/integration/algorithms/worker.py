"""One trainer process of the algorithm tests: runs a list of cases one after the other and stores what came out.

    python -m tests.integration.algorithms.worker FOLDER WORLD RANK PORT...     (one port a case)

FOLDER holds `cases_WORLD.json`: a list of {name, kind, ...}; results go to FOLDER/NAME.RANK.pt.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.integration.algorithms import own_hooks
from tests.integration.megatron.worker import make_batch, make_samples, weights
from vime.backends.megatron_utils.actor import MegatronTrainer
from vime.backends.megatron_utils.convert.transfer import parameters_by_name
from vime.backends.megatron_utils.critic import MegatronCritic, critic_config
from vime.backends.megatron_utils.optimizer import _adams
from vime.config import sections as s
from vime.config.run import RunConfig
from vime.types import TrainBatch

from megatron.core import parallel_state  # isort: skip  # after vime's package has prepared it


def config_of(case: dict[str, Any]) -> RunConfig:
    base = RunConfig(
        model=s.ModelConfig(**case["model"]),
        training=s.TrainingConfig(lr=1e-3, clip_grad=1e9, train_threads=1, **case.get("training", {})),
        data=s.DataConfig(num_rollout=200, rollout_batch_size=12),
        rollout=s.RolloutConfig(rollout_max_response_len=10),
        cluster=s.ClusterConfig(actor_num_gpus_per_node=2, actor_deadline=120.0),
        megatron_tokens=tuple(case.get("tokens", ())),
    )
    return replace(base, algorithm=s.AlgorithmConfig(**case.get("algorithm", {})), critic=s.CriticConfig(**case.get("critic", {})))


def batch_of(number: int, rank: int = 0, size: int = 1, steps: int = 1) -> TrainBatch:
    """A data-parallel rank's share of a rollout step, two micro-batches an optimizer step; sample 5 has nothing that is trained."""
    samples = make_samples(seed=number)
    nothing = np.zeros_like(samples[5].loss_mask)
    samples[5] = replace(samples[5], loss_mask=nothing, rollout_mask_sum=0.0)
    samples = [replace(sample, weight_versions=np.zeros(sample.response_length, np.float32)) for sample in samples]
    return make_batch(samples, rank=rank, size=size, micro=2, steps=steps, rollout_id=number)


def packed_random(trainer: MegatronTrainer, batch: TrainBatch) -> list[list[torch.Tensor]]:
    """Values as a critic gives them, [T] a micro-batch, drawn sample by sample."""
    out = []
    for step in trainer._packs(batch):
        out.append(
            [packed.scatter([values_of(i, n) for i, n in zip(packed.sample_ids, packed.response_lengths, strict=True)]) for packed in step]
        )
    return out


def values_of(sample_id: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(sample_id))


def train(case: dict[str, Any], where: dict[str, Any]) -> dict[str, Any]:
    """The policy's trainer: `count` steps, saved and loaded in the middle when `folder` is given."""
    out: dict[str, Any] = {"metrics": []}
    trainer = MegatronTrainer(config_of(case), **where)
    size = parallel_state.get_data_parallel_world_size()
    try:
        if case.get("load"):
            trainer.load(case["load"])
        trainer.sent_as(0)
        for number in range(case.get("first", 0), case.get("first", 0) + case.get("count", 1)):
            batch = batch_of(number, trainer.data_parallel_rank, size, case.get("steps", 1))
            values = packed_random(trainer, batch) if case.get("values") else None
            out["metrics"].append(trainer.train(batch, values))
            out["returns"] = trainer.returns
            out["moments"] = sum(len(moments) for adam in _adams(trainer._optimizer) for moments in adam.state.values())
        if case.get("save"):
            trainer.save(case["save"])
        out["weights"] = weights(trainer)
    finally:
        trainer.shutdown()
    return out


def critic(case: dict[str, Any], where: dict[str, Any]) -> dict[str, Any]:
    """The critic: it learns returns that depend on the token alone; once more from what was saved in between."""
    out: dict[str, Any] = {"metrics": [], "values": []}
    trainer = MegatronCritic(critic_config(config_of(case)), **where)
    try:
        batch = batch_of(0, trainer.data_parallel_rank, parallel_state.get_data_parallel_world_size())
        if case.get("load"):
            trainer.load(case["load"])
        for _ in range(case["count"]):
            values, perf = trainer.values(batch)
            returns = [[(micro.labels % 7).float() * micro.loss_mask for micro in step] for step in trainer._plans]
            out["values"].append(values)
            out["returns"] = returns
            out["metrics"].append(perf | trainer.train_on(batch, returns))
        if case.get("save"):
            trainer.save(case["save"])
        out["frozen"] = [name for name, p in parameters_by_name(trainer._model).items() if not p.requires_grad]
    finally:
        trainer.shutdown()
    return out


def main() -> None:
    folder, world, rank = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for case, port in zip(json.loads((folder / f"cases_{world}.json").read_text()), map(int, sys.argv[4:]), strict=True):
        where = {"rank": rank, "world_size": world, "master_addr": "127.0.0.1", "master_port": port}
        own_hooks.CALLS.clear()
        result = {"train": train, "critic": critic}[case["kind"]](case, where)
        torch.save(result | {"calls": list(own_hooks.CALLS)}, folder / f"{case['name']}.{rank}.pt")


if __name__ == "__main__":
    main()
