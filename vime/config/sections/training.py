"""The trainer: optimizer, memory, what is trained, Megatron hooks."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.fields import SEEDS, opt

__all__ = ["TrainingConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """The optimizer's main knobs; every other Megatron flag is accepted under its own name."""

    lr: float = opt(1e-6, "Learning rate.", ge=0, megatron="--lr")
    clip_grad: float = opt(1.0, "Clip the gradient's norm.", ge=0, megatron="--clip-grad")
    seed: int = opt(1234, "Seed of everything in the trainer.", ge=0, le=SEEDS, megatron="--seed")
    train_threads: int | None = opt(
        None, "CPU threads of one trainer process; default: cores shared evenly among the trainers.", type=int, ge=1
    )
    only_train_params_name_list: list[str] = opt(
        [], "Regular expressions of the parameters to train, by Megatron's names; all others are frozen.", many=True, type=str
    )
    freeze_params_name_list: list[str] = opt(
        [], "Regular expressions of the parameters to freeze, by Megatron's names.", many=True, type=str
    )
    reset_optimizer_states: bool = opt(False, "Clear the optimizer's moments and step count before each rollout step's training.")
    use_stateless_adam: bool = opt(
        False, "The same, and the moments' memory is given back after each rollout step's training (8 bytes a weight)."
    )
    log_probs_chunk_size: int = opt(
        -1,
        "Rows of logits that are turned into log-probs at a time; -1 = as many as make 1 MiB in float32 (on a GPU 256 MiB).",
        ge=-1,
    )
    recompute_loss_function: bool = opt(
        False,
        "Compute a loss of one's own once more in the backward pass instead of keeping its intermediates.",
    )
    enable_mtp_training: bool = opt(
        False, "Train the multi-token-prediction layers, too: they learn from the model, which is trained as without them."
    )
    mtp_num_layers: int | None = opt(None, "How many such layers there are; default: what config.json says.", type=int, ge=1)
    mtp_loss_scaling_factor: float = opt(0.2, "Weight of their loss.", ge=0)
    custom_megatron_init_path: str | None = opt(None, "Called once Megatron is initialised: fn(args).", type=str)
    custom_megatron_before_log_prob_hook_path: str | None = opt(
        None, "Called before a log-prob pass: fn(args, model, store_prefix).", type=str
    )
    custom_megatron_before_train_step_hook_path: str | None = opt(
        None,
        "Called before an optimizer step: fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler).",
        type=str,
    )
    rollout_data_postprocess_path: str | None = opt(
        None, "Called when log-probs and advantages are there: fn(args, rollout_id, rollout_data).", type=str
    )
