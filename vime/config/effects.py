"""Flags without effect: which settings leave which flags unread. Such a flag is refused, with the setting that would use it.

A flag counts when it was typed (`RunConfig.given`), even with its default's value, or when its field differs from the default.
Flags that a function of the user's own might read (rewards, sampling) are refused only where our own functions ignore them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vime.config.availability import set_flags
from vime.config.run import RunConfig
from vime.config.sections import ROLLOUT_FUNCTION, SFT_FUNCTION

__all__ = ["unused_flags"]


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


_LOSS = _names("eps_clip eps_clip_high eps_clip_c entropy_coef normalize_advantages use_rollout_logprobs use_kl_loss ref_load")
_WEIGHTS = _names("weight_proof_tolerance update_weight_buffer_size update_weight_deadline")

_UNUSED = (
    _Unused(
        fields=_names("tb_project_name"),
        when=lambda c: not c.logging.use_tensorboard,
        why="without --use-tensorboard: leave it out, or add that.",
    ),
    _Unused(
        fields=_names("keep_checkpoints"),
        when=lambda c: c.checkpoint.save is None,
        why="without --save, the run's folder: leave it out, or add that.",
    ),
    _Unused(
        fields=_names(
            "eval_function_path skip_eval_before_train n_samples_per_eval_prompt eval_temperature eval_top_p eval_top_k "
            "eval_max_response_len eval_input_key eval_label_key eval_reward_key"
        ),
        when=lambda c: not c.eval.eval_prompt_data,
        why="without --eval-prompt-data name path: leave it out, or add that.",
    ),
    _Unused(
        fields=_names("kl_loss_type"),
        when=lambda c: not c.algorithm.use_kl_loss,
        why="without --use-kl-loss: leave it out, or add that with --kl-loss-coef and --ref-load.",
    ),
    _Unused(
        fields=_names("loss_mask_type"),
        when=lambda c: c.rollout.rollout_function_path == ROLLOUT_FUNCTION,
        why=f"on generated responses: leave it out, or train on conversations with --rollout-function-path {SFT_FUNCTION}.",
    ),
    _Unused(
        fields=_LOSS,
        when=lambda c: c.algorithm.loss_type == "sft_loss",
        why="with --loss-type sft_loss, which is cross-entropy alone: leave it out, or use policy_loss.",
    ),
    _Unused(
        fields=_names(
            "rollout_num_gpus rollout_num_gpus_per_engine vllm_enable_deterministic_inference vllm_server_concurrency "
            "vllm_start_deadline vllm_router_ip vllm_router_port"
        )
        + _WEIGHTS,
        when=lambda c: c.debug.debug_train_only,
        why="with --debug-train-only, which starts no engines: leave one of them out.",
    ),
    _Unused(
        fields=_names(  # not --rollout-temperature, by which the trainer divides the logits
            "rm_type custom_rm_path rm_url group_rm custom_generate_function_path rollout_top_p rollout_top_k rollout_max_response_len "
            "rollout_skip_special_tokens rollout_stop rollout_stop_token_ids over_sampling_batch_size dynamic_sampling_filter_path "
            "rollout_sample_filter_path rollout_request_timeout rollout_request_retries"
        ),
        when=_supervised,
        why=f"with --debug-train-only and {SFT_FUNCTION}, which neither generates nor scores: leave it out.",
    ),
    _Unused(
        fields=(
            *_LOSS,
            *_WEIGHTS,
            *_names("kl_loss_coef kl_loss_type loss_type custom_loss_function_path calculate_per_token_loss"),
            *_names("lr clip_grad seed train_threads actor_deadline save_hf"),
        ),
        when=lambda c: c.debug.debug_rollout_only,
        why="with --debug-rollout-only, which starts no trainer: leave one of them out.",
    ),
)


def unused_flags(config: RunConfig) -> Iterator[str]:
    """One sentence for each setting under which flags of `config` have no effect."""
    flags = {spec.name: spec.flag for spec in set_flags(config)}
    for entry in _UNUSED:
        named = [flags[name] for name in entry.fields if name in flags]
        if named and entry.when(config):
            yield f"{', '.join(named)} {'has' if len(named) == 1 else 'have'} no effect {entry.why}"
    if config.debug.debug_rollout_only and config.megatron_tokens:
        tokens = " ".join(token for token in config.megatron_tokens if token.startswith("--"))
        yield f"Megatron's {tokens}: no effect with --debug-rollout-only, which starts no trainer: leave one of them out."
