"""`MegatronCritic`: one rank of PPO's critic: the trainer's model with a value head, its own optimizer, schedule and checkpoint."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from vime.backends.megatron_utils.actor import MegatronTrainer
from vime.backends.megatron_utils.loss import at_rows, value_loss
from vime.backends.megatron_utils.model import is_last
from vime.backends.megatron_utils.rollout_data import Plans
from vime.backends.megatron_utils.step import forward_each
from vime.backends.megatron_utils.step_report import slowest
from vime.backends.megatron_utils.value_head import put_value_head
from vime.config.run import RunConfig
from vime.config.sections import AlgorithmConfig, LoraConfig
from vime.packing.pack import PackedBatch
from vime.types import TrainBatch

__all__ = ["MegatronCritic", "critic_config"]

WARMUP_FLAGS = ("--lr-warmup-iters", "--lr-warmup-fraction")  # the policy's; the critic has its own

VALUE_LOSS = "value_loss"  # the critic's --loss-type, by which hooks tell it from the policy's trainer, as in slime


def critic_config(config: RunConfig) -> RunConfig:
    """The critic's own view of a run: its start weights, rate and warm-up; nothing of the policy's loss but how it is averaged."""
    critic, policy = config.critic, config.algorithm
    tokens, own = list(config.megatron_tokens), []
    while tokens:
        token = tokens.pop(0)
        if token.partition("=")[0] not in WARMUP_FLAGS:
            own.append(token)
        elif "=" not in token and tokens:
            tokens.pop(0)
    own += ["--lr-warmup-iters", str(critic.critic_lr_warmup_iters)] if critic.critic_lr_warmup_iters else []
    return replace(
        config,
        model=replace(config.model, hf_checkpoint=critic.critic_load or config.model.hf_checkpoint, ref_update_interval=None),
        training=replace(
            config.training,
            lr=config.training.lr if critic.critic_lr is None else critic.critic_lr,
            enable_mtp_training=False,
            mtp_num_layers=None,
        ),
        algorithm=AlgorithmConfig(
            loss_type=VALUE_LOSS,
            advantage_estimator=policy.advantage_estimator,
            loss_aggregation=policy.loss_aggregation,
            calculate_per_token_loss=policy.calculate_per_token_loss,
        ),
        lora=LoraConfig(),  # adapters are the policy's: the critic trains all its weights
        megatron_tokens=tuple(own),
    )


class MegatronCritic(MegatronTrainer):
    """Same layout as the policy's trainer, rank by rank; `config` is what `critic_config` makes."""

    _plans: Plans

    def values(self, batch: TrainBatch) -> tuple[list[list[torch.Tensor]], dict[str, float]]:
        """(values, metrics): of the state before each trained token, [T] of each micro-batch of each step; empty before the last
        pipeline stage. Remembered for `train_on`.
        """
        with self._watched(f"values of rollout {batch.rollout_id}"):
            seconds: dict[str, float] = defaultdict(float)
            started = time.perf_counter()
            plans = self._packs(batch)
            found = forward_each(self._model, [packed for step in plans for packed in step], self._read)
            flat = iter(found)
            self._plans = [[packed.with_token_values(values=next(flat)) for packed in step] for step in plans] if found else plans
            values = [[packed.values for packed in step if packed.values is not None] for step in self._plans] if found else []
            seconds["critic_values"] = time.perf_counter() - started
            return values, slowest(seconds, self._platform.device)

    def train_on(self, batch: TrainBatch, returns: Sequence[Sequence[torch.Tensor]]) -> dict[str, float]:
        """Train on this rank's share of the step that `values` was called with; `returns` [T] of each micro-batch of each step.

        Returns the same metrics on all ranks. Raises TrainerError when a loss or gradient is not finite.
        """
        with self._watched(f"train the critic on rollout {batch.rollout_id}"):
            seconds: dict[str, float] = defaultdict(float)
            started = time.perf_counter()
            plans = self._plans
            if returns and returns[0]:
                pairs = zip(plans, returns, strict=True)
                plans = [[p.with_token_values(returns=r) for p, r in zip(step, mine, strict=True)] for step, mine in pairs]
            steps = self._optimizer_steps(plans, batch)
            seconds["critic_train"] = time.perf_counter() - started
            metrics = {f"train/critic-{name}": float(np.mean([s[name] for s in steps])) for name in steps[0]}
            return metrics | {"train/critic-lr-pg_0": steps[-1]["lr-pg_0"]} | slowest(seconds, self._platform.device)

    def _start_weights(self, chunks: Sequence[torch.nn.Module], *, filled: bool) -> None:
        if filled:
            self._fill(chunks, str(self._config.model.hf_checkpoint))
        put_value_head(chunks, self._model_config)
        self._freeze(chunks)
        for chunk in chunks:
            if is_last(chunk):
                chunk.output_layer.requires_grad_()  # its head is its own, and always trained

    def _read(self, output: torch.Tensor, packed: PackedBatch, rows: torch.Tensor | None) -> torch.Tensor:
        """[T] from the head's [N, 1]."""
        assert rows is not None
        return at_rows(output.squeeze(-1), packed, rows, self._cp_group)

    def _loss(self, output: torch.Tensor, packed: PackedBatch, rows: torch.Tensor | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return value_loss(self._read(output, packed, rows), packed, value_clip=self._config.critic.value_clip)
