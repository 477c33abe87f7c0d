"""Prompts, responses, scores, evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vime.config.fields import SEEDS, opt

__all__ = [
    "DATA_SOURCE",
    "RECORDED_FUNCTION",
    "ROLLOUT_FUNCTION",
    "SFT_FUNCTION",
    "DataConfig",
    "EvalConfig",
    "RewardConfig",
    "RolloutConfig",
]

ROLLOUT_FUNCTION = "vime.rollout.vllm_rollout.generate_rollout"
SFT_FUNCTION = "vime.rollout.sft_rollout.generate_rollout"
RECORDED_FUNCTION = "vime.rollout.recorded.generate_rollout"
DATA_SOURCE = "vime.rollout.data_source.RolloutDataSourceWithBuffer"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Prompts, batches and steps."""

    prompt_data: str | None = opt(
        None,
        "Prompts: a .jsonl or .parquet file or a dataset's folder; path@[a:b] a slice; 2*path,1*path several with weights.",
        type=str,
        path="file",
    )
    input_key: str = opt("input", "Column with the prompt: a string, or a list of chat messages.")
    label_key: str | None = opt(None, "Column with the label that the reward compares with.", type=str)
    metadata_key: str = opt("metadata", "Column with a dict handed through to Sample.metadata.")
    tool_key: str = opt("tools", "Column with tool schemas for the chat template.")
    multimodal_keys: dict[str, Any] = opt(
        {}, "JSON object: medium (image, video, audio) -> column.", not_yet="prompts are text. Leave it out."
    )
    apply_chat_template: bool = opt(False, "Render prompts with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, Any] = opt({}, "JSON keyword arguments of the chat template.")
    bad_row_policy: str = opt(
        "fail",
        "A malformed row ends the run, or is skipped and counted.",
        choices=("fail", "skip"),
    )
    rollout_shuffle: bool = opt(False, "Shuffle the prompts anew each epoch with rollout_seed + epoch.")
    rollout_seed: int = opt(42, "Seed of shuffling and of per-request sampling seeds.", ge=0, le=SEEDS)
    num_rollout: int | None = opt(None, "Rollout steps; 0 = evaluate only.", type=int, ge=0)
    num_epoch: int | None = opt(None, "Alternative to --num-rollout: passes over the prompts.", type=int, ge=1)
    rollout_batch_size: int | None = opt(None, "Prompts per rollout step.", type=int, ge=1, required=True)
    n_samples_per_prompt: int = opt(1, "Responses per prompt: the group that GRPO compares.", ge=1)
    global_batch_size: int | None = opt(None, "Rollouts per optimizer step; default: all of a rollout step.", type=int, ge=1)
    num_steps_per_rollout: int | None = opt(None, "Alternative to --global-batch-size: optimizer steps per rollout step.", type=int, ge=1)
    micro_batch_size: int = opt(1, "Samples per micro-batch without --use-dynamic-batch-size.", ge=1)
    use_dynamic_batch_size: bool = opt(False, "Pack micro-batches up to --max-tokens-per-gpu tokens.")
    max_tokens_per_gpu: int | None = opt(None, "Token budget of one packed micro-batch on each trainer process.", type=int, ge=1)
    over_budget_samples: str = opt(
        "alone", "A sample longer than the budget gets a micro-batch of its own, or ends the run.", choices=("alone", "fail")
    )
    data_source_path: str = opt(DATA_SOURCE, "Class that supplies prompt groups: cls(args).")
    buffer_filter_path: str | None = opt(
        None,
        "Takes groups from the buffer: fn(args, rollout_id, buffer, num_samples) -> groups.",
        type=str,
    )
    buffer_max_groups: int = opt(8192, "Most groups that may wait in the buffer.", ge=1)
    buffer_overflow: str = opt(
        "fail", "More given back than it holds ends the run, or drops the groups that would be served last.", choices=("fail", "drop")
    )
    loss_mask_type: str = opt(
        "qwen",
        "Which chat-template family SFT masks follow.",
        choices=("qwen", "qwen3", "qwen3_5", "distill_qwen"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How responses are generated."""

    rollout_function_path: str = opt(ROLLOUT_FUNCTION, "The whole rollout loop: fn(args, rollout_id, data_source, evaluation=False).")
    custom_generate_function_path: str | None = opt(
        None, "Replaces generation of one sample: async fn(args, sample, sampling_params).", type=str
    )
    rollout_sample_hook_path: list[str] = opt(
        [],
        "Called on each sample before its reward: fn(args, sample, *, rollout_id=None, evaluation=False).",
        many=True,
        type=str,
    )
    rollout_temperature: float = opt(1.0, "Sampling temperature.", gt=0)
    rollout_top_p: float = opt(1.0, "Nucleus sampling: probability mass kept.", gt=0, le=1)
    rollout_top_k: int = opt(-1, "Sample among the k likeliest tokens; -1 = all.", ge=-1)
    rollout_max_context_len: int | None = opt(
        None, "Longest prompt plus response, in tokens; also the engine's max_model_len.", type=int, ge=8
    )
    rollout_max_prompt_len: int | None = opt(
        None, "Prompts longer than this are dropped and counted; default: context - 1.", type=int, ge=1
    )
    rollout_max_response_len: int = opt(1024, "Most tokens generated for one response.", ge=1)
    rollout_skip_special_tokens: bool = opt(False, "Leave special tokens out of Sample.response.")
    rollout_stop: list[str] = opt([], "Stop strings.", many=True, type=str)
    rollout_stop_token_ids: list[int] = opt([], "Stop token ids.", many=True, type=int, ge=0)
    over_sampling_batch_size: int | None = opt(
        None, "Prompts fetched at a time while a batch is filled; default: as many as are missing.", type=int, ge=1
    )
    dynamic_sampling_filter_path: str | None = opt(
        None, "Keep or drop a finished group: fn(args, group) -> bool or DynamicFilterOutput.", type=str
    )
    rollout_sample_filter_path: str | None = opt(None, "Mark samples that do not enter the loss: fn(args, groups).", type=str)
    rollout_all_samples_process_path: str | None = opt(
        None,
        "Sees all samples of a step, dropped ones too: fn(args, all_samples, data_source).",
        type=str,
    )
    partial_rollout: bool = opt(False, "Unfinished responses go back to the buffer and are continued later.")
    mask_offpolicy_in_partial_rollout: bool = opt(False, "Tokens that an earlier policy generated do not enter the loss.")
    max_weight_staleness: int = opt(
        0, "Weight versions that a trained sample may be behind; 0 = generation and training take turns.", ge=0, le=64
    )
    stale_groups: str = opt(
        "wait",
        "A group that will be over that bound is waited for; or, once it is over, generated anew or dropped.",
        choices=("wait", "reissue", "drop"),
    )
    rollout_request_timeout: float = opt(600.0, "Seconds one generation request may take.", gt=0)
    rollout_request_retries: int = opt(3, "Further tries of a request after a connection error or a 5xx.", ge=0)
    rollout_deadline: float = opt(3600.0, "Seconds a whole rollout step may take before the run ends with an error.", gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """How responses are scored."""

    rm_type: str | None = opt(None, "Built-in reward (see docs/rewards.md).", type=str)
    custom_rm_path: str | None = opt(None, "Your reward: async fn(args, sample) -> float or dict.", type=str)
    rm_url: str | None = opt(None, "Address that --rm-type remote_rm posts {prompt, response, label} to.", type=str)
    group_rm: bool = opt(False, "Score a whole group at once: async fn(args, samples) -> list.")
    reward_key: str | None = opt(None, "Which entry of a dict reward is the number.", type=str)
    eval_reward_key: str | None = opt(None, "The same for evaluation; default: --reward-key.", type=str)
    overlong_buffer_len: int | None = opt(
        None,
        "DAPO: the last tokens of --rollout-max-response-len, over which the reward falls linearly.",
        type=int,
        ge=1,
    )
    overlong_penalty_factor: float = opt(1.0, "DAPO: what a response of the full length loses.", gt=0)
    custom_reward_post_process_path: str | None = opt(None, "Replaces group normalisation: fn(args, samples) -> (raw, rewards).", type=str)
    custom_convert_samples_to_train_data_path: str | None = opt(
        None,
        "Replaces the conversion of samples to training data: fn(args, samples) -> dict.",
        type=str,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out prompts. Unset fields take the rollout's values."""

    eval_function_path: str | None = opt(None, "Rollout function for evaluation; default: --rollout-function-path.", type=str)
    eval_interval: int | None = opt(None, "Evaluate every N rollout steps, besides before the first and after the last.", type=int, ge=1)
    eval_prompt_data: list[str] = opt([], "name path [name path ...] of held-out prompt files.", many=True, type=str)
    eval_config: str | None = opt(
        None,
        "File of held-out sets with sampling, columns and rewards of their own.",
        type=str,
        path="file",
        not_yet="all sets share the --eval-... flags: give them as --eval-prompt-data name path.",
    )
    skip_eval_before_train: bool = opt(False, "No evaluation before the first step.")
    n_samples_per_eval_prompt: int = opt(1, "Responses per held-out prompt.", ge=1)
    eval_temperature: float | None = opt(None, "Temperature in evaluation; 0 = greedy.", type=float, ge=0)
    eval_top_p: float | None = opt(None, "top-p in evaluation.", type=float, gt=0, le=1)
    eval_top_k: int | None = opt(None, "top-k in evaluation.", type=int, ge=-1)
    eval_max_response_len: int | None = opt(None, "Most tokens of one response in evaluation.", type=int, ge=1)
    eval_max_prompt_len: int | None = opt(
        None,
        "Longest held-out prompt, in tokens.",
        type=int,
        ge=1,
        not_yet="--rollout-max-prompt-len holds for evaluation, too.",
    )
    eval_max_context_len: int | None = opt(
        None,
        "Longest prompt plus response in evaluation, in tokens.",
        type=int,
        ge=8,
        not_yet="--rollout-max-context-len holds for evaluation, too.",
    )
    eval_min_new_tokens: int | None = opt(
        None, "Fewest tokens of one response in evaluation.", type=int, ge=0, not_yet="responses end where the model ends them."
    )
    eval_input_key: str | None = opt(None, "Prompt column of the held-out files.", type=str)
    eval_label_key: str | None = opt(None, "Label column of the held-out files.", type=str)
    eval_tool_key: str | None = opt(
        None, "Tool column of the held-out files.", type=str, not_yet="--tool-key names the column of the held-out files, too."
    )
