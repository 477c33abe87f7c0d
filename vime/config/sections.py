"""The sections of a run's configuration. Each part of the framework is handed the section it needs, nothing more.

Frozen, keyword-only, slotted. Names and defaults are slime's and Vime's; what departs from them says so in its line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vime.config.fields import opt

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "DataConfig",
    "DebugConfig",
    "EngineConfig",
    "EvalConfig",
    "LoggingConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "TrainingConfig",
    "WeightUpdateConfig",
]

ROLLOUT_FUNCTION = "vime.rollout.vllm_rollout.generate_rollout"
SFT_FUNCTION = "vime.rollout.sft_rollout.generate_rollout"
DATA_SOURCE = "vime.rollout.data_source.RolloutDataSourceWithBuffer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Placement: which processes run, and on what."""

    device: str = opt("cpu", "Where trainer and engines compute.", choices=("cpu", "cuda"))
    actor_num_nodes: int = opt(1, "Nodes used by the trainer.", ge=1)
    actor_num_gpus_per_node: int = opt(1, "Trainer processes per node: GPUs, or processes on CPU. slime's default is 8.", ge=1)
    rollout_num_gpus: int | None = opt(None, "GPUs (on CPU: engine slots) for rollout in all; default: one engine's.", type=int, ge=0)
    rollout_num_gpus_per_engine: int = opt(
        1,
        "GPUs of one engine (its tensor-parallel size). One is right while the model fits: engines scale better than tensor parallelism.",
        ge=1,
    )
    colocate: bool = opt(False, "Trainer and engines share the same devices and take turns.")
    actor_deadline: float = opt(600.0, "Seconds a trainer call may take before the run ends with an error.", gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model is trained."""

    hf_checkpoint: str | None = opt(None, "Hugging Face model folder: configuration, tokenizer and start weights.", type=str)
    ref_load: str | None = opt(None, "Hugging Face folder of the frozen reference model (needed by KL terms).", type=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Prompts, batches and steps."""

    prompt_data: str | None = opt(None, "Prompt file (.jsonl); path@[a:b] takes a slice of its rows.", type=str)
    input_key: str = opt("input", "Column with the prompt: a string, or a list of chat messages.")
    label_key: str | None = opt(None, "Column with the label that the reward compares with.", type=str)
    metadata_key: str = opt("metadata", "Column with a dict handed through to Sample.metadata.")
    tool_key: str = opt("tools", "Column with tool schemas for the chat template.")
    apply_chat_template: bool = opt(False, "Render prompts with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, Any] = opt({}, "JSON keyword arguments of the chat template.")
    rollout_shuffle: bool = opt(False, "Shuffle the prompts anew each epoch with rollout_seed + epoch.")
    rollout_seed: int = opt(42, "Seed of shuffling and of per-request sampling seeds.")
    num_rollout: int | None = opt(None, "Rollout steps; 0 = evaluate only.", type=int, ge=0)
    num_epoch: int | None = opt(None, "Alternative to --num-rollout: passes over the prompts.", type=int, ge=1)
    rollout_batch_size: int | None = opt(None, "Prompts per rollout step.", type=int, ge=1, required=True)
    n_samples_per_prompt: int = opt(1, "Responses per prompt: the group that GRPO compares.", ge=1)
    global_batch_size: int | None = opt(None, "Rollouts per optimizer step; default: all of a rollout step.", type=int, ge=1)
    num_steps_per_rollout: int | None = opt(None, "Alternative to --global-batch-size: optimizer steps per rollout step.", type=int, ge=1)
    micro_batch_size: int = opt(1, "Samples per micro-batch without --use-dynamic-batch-size.", ge=1)
    use_dynamic_batch_size: bool = opt(False, "Pack micro-batches up to --max-tokens-per-gpu tokens.")
    max_tokens_per_gpu: int | None = opt(None, "Token budget of one packed micro-batch.", type=int, ge=1)
    data_source_path: str = opt(DATA_SOURCE, "Class that supplies prompt groups: cls(args).")
    loss_mask_type: str = opt("qwen", "Which chat-template family SFT masks follow.", choices=("qwen", "qwen3"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How responses are generated."""

    rollout_function_path: str = opt(ROLLOUT_FUNCTION, "The whole rollout loop: fn(args, rollout_id, data_source, evaluation=False).")
    custom_generate_function_path: str | None = opt(
        None, "Replaces generation of one sample: async fn(args, sample, sampling_params).", type=str
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
    rollout_stop_token_ids: list[int] = opt([], "Stop token ids.", many=True, type=int)
    over_sampling_batch_size: int | None = opt(
        None, "Prompts fetched at a time while a batch is filled; default: as many as are missing.", type=int, ge=1
    )
    dynamic_sampling_filter_path: str | None = opt(
        None, "Keep or drop a finished group: fn(args, group) -> bool or DynamicFilterOutput.", type=str
    )
    rollout_sample_filter_path: str | None = opt(None, "Mark samples that do not enter the loss: fn(args, groups).", type=str)
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
    custom_reward_post_process_path: str | None = opt(None, "Replaces group normalisation: fn(args, samples) -> (raw, rewards).", type=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out prompts. Unset fields take the rollout's values."""

    eval_function_path: str | None = opt(None, "Rollout function for evaluation; default: --rollout-function-path.", type=str)
    eval_interval: int | None = opt(None, "Evaluate every N rollout steps.", type=int, ge=1)
    eval_prompt_data: list[str] = opt([], "name path [name path ...] of held-out prompt files.", many=True, type=str)
    skip_eval_before_train: bool = opt(False, "No evaluation before the first step.")
    n_samples_per_eval_prompt: int = opt(1, "Responses per held-out prompt.", ge=1)
    eval_temperature: float | None = opt(None, "Temperature in evaluation; 0 = greedy.", type=float, ge=0)
    eval_top_p: float | None = opt(None, "top-p in evaluation.", type=float, gt=0, le=1)
    eval_top_k: int | None = opt(None, "top-k in evaluation.", type=int, ge=-1)
    eval_max_response_len: int | None = opt(None, "Most tokens of one response in evaluation.", type=int, ge=1)
    eval_input_key: str | None = opt(None, "Prompt column of the held-out files.", type=str)
    eval_label_key: str | None = opt(None, "Label column of the held-out files.", type=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """Advantages and losses."""

    advantage_estimator: str = opt("grpo", "Algorithm.", choices=("grpo",))
    grpo_std_normalization: bool = opt(
        True, "Dr.GRPO: do not divide by the group's standard deviation.", flag="--disable-grpo-std-normalization", negated=True
    )
    rewards_normalization: bool = opt(True, "Do not subtract the group's mean.", flag="--disable-rewards-normalization", negated=True)
    compute_advantages_and_returns: bool = opt(True, "No advantages (SFT).", flag="--disable-compute-advantages-and-returns", negated=True)
    loss_type: str = opt("policy_loss", "Which loss.", choices=("policy_loss", "sft_loss", "custom_loss"))
    custom_loss_function_path: str | None = opt(
        None, "With --loss-type custom_loss: fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics).", type=str
    )
    eps_clip: float = opt(0.2, "Lower clip distance of the probability ratio.", ge=0)
    eps_clip_high: float | None = opt(None, "Upper clip distance; default: --eps-clip.", type=float, ge=0)
    eps_clip_c: float | None = opt(None, "Dual clip: bound on the ratio for negative advantages.", type=float, gt=1)
    use_kl_loss: bool = opt(False, "Add KL(policy || reference) to the loss.")
    kl_loss_coef: float = opt(0.0, "Its coefficient.", ge=0)
    kl_loss_type: str = opt("k1", "Its estimator.", choices=("k1", "k2", "k3", "low_var_kl"))
    entropy_coef: float = opt(0.0, "Coefficient of the entropy bonus.", ge=0)
    normalize_advantages: bool = opt(False, "Whiten advantages over the whole batch.")
    calculate_per_token_loss: bool = opt(False, "Mean over all tokens instead of per rollout, then over rollouts.")
    use_rollout_logprobs: bool = opt(False, "Take the engine's log-probs as the old policy's, instead of recomputing them.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """The optimizer's main knobs; every other Megatron flag is accepted under its own name."""

    lr: float = opt(1e-6, "Learning rate.", ge=0, megatron="--lr")
    clip_grad: float = opt(1.0, "Clip the gradient's norm.", ge=0, megatron="--clip-grad")
    seed: int = opt(1234, "Seed of everything in the trainer.", megatron="--seed")
    train_threads: int | None = opt(
        None, "CPU threads of one trainer process; default: cores shared evenly among the trainers.", type=int, ge=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateConfig:
    """How the trainer's weights reach the engines, and the proof that they did."""

    update_weight_buffer_size: int = opt(512 * 1024**2, "Bytes of one flat bucket.", ge=1024)
    weight_proof_tolerance: float | None = opt(
        None, "Largest |log-prob of trainer - engine| on the probe prompt; default 1e-4 in float32, 0.1 in bfloat16.", type=float, gt=0
    )
    update_weight_deadline: float = opt(300.0, "Seconds one weight sync may take before the run ends with an error.", gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The vLLM engines and the router; the engines' own flags are --vllm-X, the router's --router-X."""

    vllm_server_concurrency: int = opt(512, "Most requests in flight per engine.", ge=1)
    vllm_router_ip: str | None = opt(None, "Address of a router that runs already.", type=str)
    vllm_router_port: int | None = opt(None, "Its port.", type=int, ge=1, le=65535)
    vllm_enable_deterministic_inference: bool = opt(
        False, "A seed per request and one sequence at a time on CPU: a resumed run equals an uninterrupted one bitwise."
    )
    vllm_start_deadline: float = opt(600.0, "Seconds an engine may take to become healthy.", gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    save: str | None = opt(None, "Run folder: checkpoints, metrics, logs. A run whose folder holds a commit resumes from it.", type=str)
    load: str | None = opt(None, "Folder of another run to start from; default: --save, when it holds a commit.", type=str)
    save_interval: int | None = opt(
        None, "Commit every N rollout steps; the last step is always committed when --save is given.", type=int, ge=1
    )
    save_hf: str | None = opt(None, "Also write a Hugging Face folder at each commit; {rollout_id} is filled in.", type=str)
    keep_checkpoints: int = opt(2, "Commits kept; older ones are removed after a newer one is complete.", ge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """Metrics and status."""

    use_tensorboard: bool = opt(False, "Write TensorBoard events.")
    tb_project_name: str | None = opt(None, "Folder of the TensorBoard events; default: <save>/tensorboard.", type=str)
    log_samples: int = opt(2, "Samples written to <save>/samples.jsonl per step.", ge=0)
    log_dir: str | None = opt(None, "Folder of metrics and process logs; default: --save, else a temporary folder.", type=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """Partial runs."""

    debug_train_only: bool = opt(False, "No engines: the rollout function supplies finished samples (SFT).")
    debug_rollout_only: bool = opt(False, "No trainer: generate and score only.")
