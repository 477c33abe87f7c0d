"""Flags without effect: which settings leave which flags unread. Such a flag is refused, with the setting that would use it.

A flag counts when it was typed (`RunConfig.given`), even with its default's value, or when its field differs from the default.
Flags that a function of the user's own might read (rewards, sampling) are refused only where our own functions ignore them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from vime.config.algorithm_rules import ALGORITHM_EFFECTS, LOSS_FIELDS
from vime.config.availability import set_flags
from vime.config.fields import flag_specs
from vime.config.run import SECTIONS, RunConfig
from vime.config.sections import ROLLOUT_FUNCTION, SFT_FUNCTION
from vime.config.sources import flags_in

__all__ = ["find_unused", "settings_without_effect", "unused_flags"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unused:
    """These fields are read by nobody in a run of which `when` is true."""

    fields: tuple[str, ...]
    when: Callable[[RunConfig], bool]
    why: str  # goes on after "--x has no effect ": the setting, and the cure


def _names(words: str) -> tuple[str, ...]:
    return tuple(words.split())


def _supervised(config: RunConfig) -> bool:
    """Everything that makes samples is ours, and generates none."""
    own_eval = config.eval.eval_function_path is not None
    return config.debug.debug_train_only and config.rollout.rollout_function_path == SFT_FUNCTION and not own_eval


_WEIGHTS = _names(
    "weight_proof_tolerance update_weight_buffer_size update_weight_deadline update_weight_mode update_weight_transport "
    "update_weight_disk_dir update_weight_disk_keep_files update_weight_local_checkpoint_dir update_weight_delta_encoding "
    "custom_update_weight_post_write_path update_weights_interval update_weight_in_flight lora_sync"
)
_PROBES = _names("rollout_health_check_interval rollout_health_check_timeout rollout_health_check_first_wait")
_ENGINES = _names(
    "rollout_num_gpus rollout_num_gpus_per_engine offload_rollout vllm_enable_deterministic_inference vllm_server_concurrency "
    "vllm_start_deadline vllm_router_ip vllm_router_port vllm_config prefill_num_servers rollout_external_engine_addrs use_fault_tolerance "
    "partial_rollout mask_offpolicy_in_partial_rollout max_weight_staleness stale_groups"
)
_GENERATION = _names(
    "rm_type custom_rm_path rm_url group_rm reward_key overlong_buffer_len overlong_penalty_factor "
    "custom_generate_function_path rollout_sample_hook_path rollout_top_p rollout_top_k rollout_max_response_len "
    "rollout_skip_special_tokens rollout_stop rollout_stop_token_ids over_sampling_batch_size dynamic_sampling_filter_path "
    "rollout_sample_filter_path rollout_all_samples_process_path rollout_request_timeout rollout_request_retries "
    "buffer_filter_path buffer_max_groups buffer_overflow"
)
_EVALUATION = _names(
    "skip_eval_before_train n_samples_per_eval_prompt eval_temperature eval_top_p eval_top_k eval_max_response_len eval_max_prompt_len "
    "eval_max_context_len eval_min_new_tokens eval_input_key eval_label_key eval_tool_key eval_reward_key "
    "custom_eval_rollout_log_function_path"
)
_WANDB = _names("wandb_mode wandb_dir wandb_host wandb_team wandb_project wandb_group wandb_random_suffix wandb_run_id")
_DISK = _names(
    "update_weight_disk_dir update_weight_disk_keep_files update_weight_local_checkpoint_dir custom_update_weight_post_write_path"
)
_CRITIC = _names("critic_load critic_lr critic_lr_warmup_iters num_critic_only_steps value_clip")
_LORA = _names("lora_alpha lora_dropout lora_target_modules lora_load lora_sync")
_TRAINER = _names(
    "actor_num_nodes actor_num_gpus_per_node offload_train train_env_vars actor_deadline lr clip_grad seed train_threads "
    "only_train_params_name_list freeze_params_name_list reset_optimizer_states use_stateless_adam log_probs_chunk_size "
    "async_save no_load_optim recompute_loss_function enable_mtp_training mtp_num_layers mtp_loss_scaling_factor custom_megatron_init_path "
    "custom_megatron_before_train_step_hook_path custom_model_provider_path rollout_data_postprocess_path save_hf lora_rank keep_old_actor "
    "loss_type custom_loss_function_path calculate_per_token_loss loss_aggregation kl_loss_coef kl_loss_type save_debug_train_data "
    "capsule_steps capsule_dir capsule_state profile_target memory_snapshot_dir memory_snapshot_num_steps"
)


def _supervised_loss(config: RunConfig) -> bool:
    return _supervised(config) and config.algorithm.loss_type == "sft_loss"


def _greedy_evaluation(config: RunConfig) -> bool:
    return config.eval.eval_temperature == 0 and config.eval.eval_function_path is None


_UNUSED = (
    _Unused(
        fields=_names("tb_project_name tb_experiment_name"),
        when=lambda c: not c.logging.use_tensorboard,
        why="without --use-tensorboard: leave it out, or add that.",
    ),
    _Unused(fields=_WANDB, when=lambda c: not c.logging.use_wandb, why="without --use-wandb: leave it out, or add that."),
    _Unused(
        fields=_names("wandb_random_suffix"),
        when=lambda c: c.logging.wandb_group is None,
        why="without --wandb-group, to which the suffix would be added: leave it out, or add that.",
    ),
    _Unused(
        fields=_names("save_interval async_save save_hf keep_checkpoints"),
        when=lambda c: c.checkpoint.save is None,
        why="without --save, the run's folder: leave it out, or add that.",
    ),
    _Unused(
        fields=_names("mtp_num_layers mtp_loss_scaling_factor"),
        when=lambda c: not c.training.enable_mtp_training,
        why="without --enable-mtp-training: leave it out, or add that.",
    ),
    _Unused(
        fields=_names("ckpt_step no_load_optim"),
        when=lambda c: c.checkpoint.load is None,
        why="without --load: a run resumes from the newest commit in its own --save, with all that is in it. Leave it out, or add that.",
    ),
    _Unused(
        fields=_names("eval_function_path eval_interval") + _EVALUATION,
        when=lambda c: not c.eval.eval_prompt_data and c.eval.eval_config is None,
        why="without --eval-prompt-data name path: leave it out, or add that.",
    ),
    _Unused(
        fields=_names("eval_interval skip_eval_before_train"),
        when=lambda c: c.data.num_rollout == 0,
        why="with --num-rollout 0, which evaluates once and ends: leave it out.",
    ),
    _Unused(
        fields=_names("eval_top_p eval_top_k"),
        when=_greedy_evaluation,
        why="with --eval-temperature 0, which takes the likeliest token: leave one of them out.",
    ),
    *(_Unused(fields=_names(fields), when=when, why=why) for fields, when, why in ALGORITHM_EFFECTS),
    _Unused(
        fields=_names("loss_mask_type"),
        when=lambda c: c.rollout.rollout_function_path == ROLLOUT_FUNCTION,
        why=f"on generated responses: leave it out, or train on conversations with --rollout-function-path {SFT_FUNCTION}.",
    ),
    _Unused(
        fields=_names("micro_batch_size"),
        when=lambda c: c.data.use_dynamic_batch_size,
        why="with --use-dynamic-batch-size: leave one of them out.",
    ),
    _Unused(
        fields=_names("rm_url"),
        when=lambda c: c.reward.rm_type is not None and c.reward.rm_type.removeprefix("boxed_") != "remote_rm",
        why="without --rm-type remote_rm: leave it out, or add that.",
    ),
    _Unused(
        fields=_names("mask_offpolicy_in_partial_rollout"),
        when=lambda c: not c.rollout.partial_rollout,
        why="without --partial-rollout: leave it out, or add that.",
    ),
    _Unused(
        fields=_names("partial_rollout"),
        when=lambda c: c.rollout.rollout_function_path == ROLLOUT_FUNCTION and c.rollout.over_sampling_batch_size is None,
        why="without --over-sampling-batch-size, as a step then waits for every group it began: leave it out, or add that.",
    ),
    _Unused(
        fields=_names("partial_rollout mask_offpolicy_in_partial_rollout over_sampling_batch_size"),
        when=lambda c: c.runs_ahead and c.rollout.rollout_function_path == ROLLOUT_FUNCTION,
        why="with --max-weight-staleness, where what is unfinished at the end of a step simply goes on: leave one of them out.",
    ),
    _Unused(
        fields=_names("stale_groups"),
        when=lambda c: not c.runs_ahead,
        why="without --max-weight-staleness: leave it out, or add that.",
    ),
    _Unused(
        fields=_names("stale_groups"),
        when=lambda c: c.rollout.rollout_function_path != ROLLOUT_FUNCTION,
        why="with a --rollout-function-path of your own, whose batches are trained as they come: leave it out.",
    ),
    _Unused(
        fields=_names("partial_rollout"),
        when=lambda c: c.engine.vllm_enable_deterministic_inference,
        why="with --vllm-enable-deterministic-inference, where speed may not decide what is cut off: leave one of them out.",
    ),
    _Unused(
        fields=_names("custom_reward_post_process_path"),
        when=lambda c: c.reward.custom_convert_samples_to_train_data_path is not None,
        why="with --custom-convert-samples-to-train-data-path, which gives the rewards, too: leave one of them out.",
    ),
    _Unused(
        fields=_names("update_weight_in_flight"),
        when=lambda c: c.rollout.max_weight_staleness == 0,
        why="without --max-weight-staleness, as no request is in flight then: leave it out, or add that.",
    ),
    _Unused(
        fields=_names("keep_old_actor"),
        when=lambda c: c.steps_ahead == 0 and c.rollout.over_sampling_batch_size is None,
        why="without --max-weight-staleness, --update-weights-interval or --over-sampling-batch-size, as data is never older than the "
        "policy: leave it out.",
    ),
    _Unused(
        fields=_PROBES,
        when=lambda c: not c.fault_tolerance.use_fault_tolerance,
        why="without --use-fault-tolerance: leave it out, or add that.",
    ),
    _Unused(
        fields=_names("recompute_loss_function"),
        when=lambda c: c.algorithm.loss_type != "custom_loss",
        why="without --loss-type custom_loss, as our own losses keep nothing as large as the logits but those: leave it out.",
    ),
    _Unused(
        fields=_names("reset_optimizer_states"),
        when=lambda c: c.training.use_stateless_adam,
        why="with --use-stateless-adam, which does it, too: leave one of them out.",
    ),
    _Unused(
        fields=_names("over_budget_samples"),
        when=lambda c: not c.data.use_dynamic_batch_size,
        why="without --use-dynamic-batch-size and --max-tokens-per-gpu, which set the budget: leave it out, or add those.",
    ),
    _Unused(
        fields=_names("colocate"),
        when=lambda c: c.cluster.device == "cpu",
        why="with --device cpu, whose cores engines and trainers share without it: leave it out.",
    ),
    _Unused(
        fields=_names("offload_train offload_rollout"),
        when=lambda c: c.cluster.device == "cuda" and not c.cluster.colocate,
        why="without --colocate, as nobody else wants the memory: leave it out, or add that.",
    ),
    _Unused(
        fields=_names("offload_train offload_rollout"),
        when=lambda c: c.cluster.device == "cpu",
        why="without --device cuda: leave it out, or add that.",
    ),
    _Unused(
        fields=_DISK,
        when=lambda c: c.weight_update.update_weight_transport != "disk",
        why="without --update-weight-transport disk: leave it out, or add that.",
    ),
    _Unused(
        fields=_names("update_weight_delta_encoding"),
        when=lambda c: c.weight_update.update_weight_mode != "delta",
        why="without --update-weight-mode delta: leave it out, or add that.",
    ),
    _Unused(fields=_LORA, when=lambda c: c.lora.lora_rank is None, why="without --lora-rank: leave it out, or add that."),
    _Unused(
        fields=_CRITIC,
        when=lambda c: c.algorithm.advantage_estimator != "ppo",
        why="without --advantage-estimator ppo, the one that has a critic: leave it out, or use that.",
    ),
    _Unused(
        fields=_names("load_debug_rollout_data_subsample"),
        when=lambda c: c.debug.load_debug_rollout_data is None,
        why="without --load-debug-rollout-data: leave it out, or add that.",
    ),
    _Unused(
        fields=_names("capsule_dir capsule_state"),
        when=lambda c: not c.debug.capsule_steps,
        why="without --capsule-steps, the steps to record: leave it out, or add that.",
    ),
    _Unused(
        fields=_names("save_debug_rollout_data save_debug_train_data"),
        when=lambda c: c.debug.dump_details is not None,
        why="with --dump-details, which names both files: leave one of them out.",
    ),
    _Unused(
        fields=LOSS_FIELDS,
        when=lambda c: c.algorithm.loss_type == "sft_loss",
        why="with --loss-type sft_loss, which is cross-entropy alone: leave it out, or use policy_loss.",
    ),
    _Unused(
        fields=_ENGINES + _PROBES + _WEIGHTS,
        when=lambda c: c.debug.debug_train_only,
        why="with --debug-train-only, which starts no engines: leave one of them out.",
    ),
    _Unused(
        fields=_GENERATION,
        when=_supervised,
        why=f"with --debug-train-only and {SFT_FUNCTION}, which neither generates nor scores: leave it out.",
    ),
    _Unused(
        fields=_names("rollout_temperature"),
        when=_supervised_loss,
        why="with --loss-type sft_loss on given answers, which are learnt at temperature 1: leave it out.",
    ),
    _Unused(
        fields=(*LOSS_FIELDS, *_WEIGHTS, *_TRAINER, *_CRITIC, *_LORA, "max_weight_staleness", "stale_groups"),
        when=lambda c: c.debug.debug_rollout_only,
        why="with --debug-rollout-only, which starts no trainer: leave one of them out.",
    ),
)


def unused_flags(config: RunConfig) -> Iterator[str]:
    """One sentence for each setting under which flags of `config` have no effect."""
    return (sentence for _, sentence in find_unused(config))


def find_unused(config: RunConfig, *, planned: bool = False, unsure: Collection[str] = ()) -> Iterator[tuple[frozenset[str], str]]:
    """(fields, sentence) for each setting under which flags of `config` have no effect. A flag is named once, by the first of them.

    What is not available yet is left to that rule where the cure would be another thing that is not, unless it is `planned`.
    A setting that hangs on a flag of `unsure`, whose value is not known, is passed over.
    """
    flags = {spec.name: spec for spec in set_flags(config)}
    missing = frozenset() if planned else _not_yet()
    for entry in _UNUSED:
        others = set(flags_in(entry.why))
        if not others.isdisjoint(unsure) or not entry.when(config):
            continue
        dead_end = not missing.isdisjoint(others)
        named = [flags[name] for name in entry.fields if name in flags and not (dead_end and flags[name].flag in missing)]
        if named:
            verb = "has" if len(named) == 1 else "have"
            yield frozenset(spec.name for spec in named), f"{', '.join(s.flag for s in named)} {verb} no effect {entry.why}"
        flags = {name: spec for name, spec in flags.items() if spec not in named}
    if config.debug.debug_rollout_only and config.megatron_tokens:
        tokens = " ".join(token for token in config.megatron_tokens if token.startswith("--"))
        yield frozenset(), f"Megatron's {tokens}: no effect with --debug-rollout-only, which starts no trainer: leave one of them out."


def settings_without_effect(field: str) -> list[str]:
    """The settings under which nobody reads `field`, in words: "with --num-rollout 0, which evaluates once and ends"."""
    return [entry.why.partition(":")[0] for entry in _UNUSED if field in entry.fields]


def _not_yet() -> frozenset[str]:
    """The flags that nothing reads yet."""
    return frozenset(spec.flag for section in SECTIONS.values() for spec in flag_specs(section) if spec.not_yet)
