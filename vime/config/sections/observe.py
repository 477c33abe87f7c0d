"""Metrics, dumps, profiles, partial runs."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.fields import opt

__all__ = ["DebugConfig", "LoggingConfig"]

WANDB = "metrics go to <log-dir>/metrics.jsonl and, with --use-tensorboard, to TensorBoard."
PROFILE = "seconds of each phase are metrics (perf/...). Attach a profiler of the system's."


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """Metrics and status."""

    use_tensorboard: bool = opt(False, "Write TensorBoard events.")
    tb_project_name: str | None = opt(None, "Folder of the TensorBoard events; default: <save>/tensorboard.", type=str, path="new")
    tb_experiment_name: str | None = opt(None, "Folder inside it.", type=str, not_yet="name the folder in --tb-project-name.")
    use_wandb: bool = opt(False, "Send metrics to Weights & Biases; the key is in WANDB_API_KEY.", not_yet=WANDB)
    wandb_mode: str | None = opt(None, "Its mode.", type=str, choices=("online", "offline", "disabled"), not_yet=WANDB)
    wandb_dir: str | None = opt(None, "Folder of its files; default: <log-dir>/wandb.", type=str, path="new", not_yet=WANDB)
    wandb_host: str | None = opt(None, "Its server.", type=str, not_yet=WANDB)
    wandb_team: str | None = opt(None, "Its entity.", type=str, not_yet=WANDB)
    wandb_project: str | None = opt(None, "Its project.", type=str, not_yet=WANDB)
    wandb_group: str | None = opt(None, "Its group, to which a random suffix is added.", type=str, not_yet=WANDB)
    wandb_random_suffix: bool = opt(
        True, "Leave the group's name as it is.", flag="--disable-wandb-random-suffix", negated=True, not_yet=WANDB
    )
    wandb_run_id: str | None = opt(None, "Run to go on with; default: the one that the commit names.", type=str, not_yet=WANDB)
    log_samples: int = opt(2, "Samples written to <save>/samples.jsonl per step.", ge=0)
    log_dir: str | None = opt(None, "Folder of metrics and process logs; default: --save, else a temporary folder.", type=str, path="new")
    log_passrate: bool = opt(False, "pass@k of the training samples.")
    log_multi_turn: bool = opt(False, "Statistics of turns.")
    log_reward_category: str | None = opt(None, "Entry of a dict reward whose values are counted.", type=str)
    log_correct_samples: bool = opt(False, "Statistics of the correct samples alone.")
    custom_rollout_log_function_path: str | None = opt(
        None,
        "Replaces a step's rollout metrics: fn(rollout_id, args, samples, extra_metrics, rollout_time) -> bool.",
        type=str,
    )
    custom_eval_rollout_log_function_path: str | None = opt(
        None, "The same for evaluation: fn(rollout_id, args, data, extra_metrics) -> bool.", type=str
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """Partial runs, dumps and profiles."""

    debug_train_only: bool = opt(False, "No engines: the rollout function supplies finished samples (SFT).")
    debug_rollout_only: bool = opt(False, "No trainer: generate and score only.")
    save_debug_rollout_data: str | None = opt(
        None, "File of each step's samples (JSON lines); {rollout_id} is filled in.", type=str, path="new"
    )
    load_debug_rollout_data: str | None = opt(
        None,
        "Train on such files, with no engines and no evaluation; {rollout_id} is filled in.",
        type=str,
        path="new",
    )
    load_debug_rollout_data_subsample: float | None = opt(None, "Share of their groups to take, the first ones.", type=float, gt=0, le=1)
    save_debug_train_data: str | None = opt(
        None, "File of each step's training data and results (torch.load); {rollout_id} is filled in.", type=str, path="new"
    )
    dump_details: str | None = opt(
        None, "Folder for both of these files: rollout_data/{rollout_id}.jsonl, train_data/{rollout_id}.pt.", type=str, path="new"
    )
    capsule_steps: list[int] = opt([], "Rollout steps, from 0, recorded whole for `vime replay`.", many=True, type=int, ge=0)
    capsule_dir: str | None = opt(None, "Folder of the step capsules; default: <save>/capsules.", type=str, path="new")
    capsule_state: str = opt(
        "stored",
        "The state before the step: in the capsule, or a reference to the start model or to the commit before, where there is one.",
        choices=("stored", "referenced"),
    )
    profile_target: list[str] = opt(
        ["train_overall"],
        "What Megatron's --profile records.",
        many=True,
        type=str,
        choices=("train_overall", "train_actor", "train_log_probs"),
        not_yet=PROFILE,
    )
    memory_snapshot_dir: str | None = opt(
        None, "Folder of GPU memory snapshots; default: <log-dir>.", type=str, path="new", not_yet=PROFILE
    )
    memory_snapshot_num_steps: int | None = opt(None, "Take them in the first N steps.", type=int, ge=1, not_yet=PROFILE)
