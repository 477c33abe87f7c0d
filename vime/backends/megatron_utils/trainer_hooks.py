"""The user's functions at fixed points of a trainer process, under slime's names and with its arguments (docs/hooks.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vime.backends.megatron_utils.loss_policy import LossHooks
from vime.config.run import RunConfig
from vime.hooks import KINDS, hook_errors, load_hook

__all__ = ["TrainerHooks", "load_loss_hooks", "optional_hook"]


def optional_hook(path: str | None, kind: str) -> Any:
    """The user's function at `path`; None without one. Raises HookError."""
    return None if path is None else load_hook(path, kind)


def load_loss_hooks(config: RunConfig) -> LossHooks:
    """What the loss is given of the user's functions. Raises HookError."""
    algorithm = config.algorithm
    return LossHooks(
        args=config.args,
        custom_loss=optional_hook(algorithm.custom_loss_function_path, "custom_loss_function_path"),
        custom_tis=optional_hook(algorithm.custom_tis_function_path, "custom_tis_function_path"),
        pg_loss_reducer=optional_hook(algorithm.custom_pg_loss_reducer_function_path, "custom_pg_loss_reducer_function_path"),
        recompute=config.training.recompute_loss_function,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerHooks:
    """Loaded functions; None = not given. What one raises becomes a HookError with the line in the user's file."""

    args: Any
    init: Callable[..., Any] | None
    before_log_prob: Callable[..., Any] | None
    before_train_step: Callable[..., Any] | None

    @classmethod
    def load(cls, config: RunConfig) -> TrainerHooks:
        """Those that `config` names. Raises HookError."""
        training = config.training
        log_prob, step = training.custom_megatron_before_log_prob_hook_path, training.custom_megatron_before_train_step_hook_path
        return cls(
            args=config.args,
            init=optional_hook(training.custom_megatron_init_path, "custom_megatron_init_path"),
            before_log_prob=optional_hook(log_prob, "custom_megatron_before_log_prob_hook_path"),
            before_train_step=optional_hook(step, "custom_megatron_before_train_step_hook_path"),
        )

    def call_init(self) -> None:
        """Megatron's process groups are there and the seeds are set; the model is not built yet."""
        self._call("custom_megatron_init_path", self.init)

    def call_before_log_prob(self, model: Sequence[torch.nn.Module], store_prefix: str) -> None:
        """A pass for `store_prefix`log_probs begins: "" under the policy, "ref_", "teacher_" with those weights in `model`."""
        self._call("custom_megatron_before_log_prob_hook_path", self.before_log_prob, list(model), store_prefix)

    def call_before_train_step(
        self, rollout_id: int, step_id: int, model: Sequence[torch.nn.Module], optimizer: Any, schedule: Any
    ) -> None:
        """The optimizer step `step_id` of rollout step `rollout_id` begins; gradients are 0."""
        arguments = (rollout_id, step_id, list(model), optimizer, schedule)
        self._call("custom_megatron_before_train_step_hook_path", self.before_train_step, *arguments)

    def _call(self, name: str, function: Callable[..., Any] | None, *arguments: Any) -> None:
        if function is not None:
            with hook_errors(KINDS[name].flag, str(getattr(self.args, name)), function):
                function(self.args, *arguments)
