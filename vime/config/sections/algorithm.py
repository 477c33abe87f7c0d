"""Advantages, losses, the critic."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.estimators import ESTIMATORS
from vime.config.fields import opt

__all__ = ["AlgorithmConfig", "CriticConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """Advantages and losses."""

    advantage_estimator: str = opt("grpo", "Algorithm.", choices=tuple(ESTIMATORS))
    grpo_std_normalization: bool = opt(
        True, "Dr.GRPO: do not divide by the group's standard deviation.", flag="--disable-grpo-std-normalization", negated=True
    )
    rewards_normalization: bool = opt(True, "Do not subtract the group's mean.", flag="--disable-rewards-normalization", negated=True)
    compute_advantages_and_returns: bool = opt(True, "No advantages (SFT).", flag="--disable-compute-advantages-and-returns", negated=True)
    custom_advantage_function_path: str | None = opt(
        None,
        "Replaces advantages: fn(args, rollout_data) sets advantages and returns.",
        type=str,
    )
    gamma: float = opt(1.0, "Discount of later rewards, per token.", ge=0, le=1)
    lambd: float = opt(1.0, "Lambda of generalised advantage estimation.", ge=0, le=1)
    kl_coef: float = opt(0.0, "Coefficient of the KL penalty in the token rewards.", ge=0)
    normalize_advantages: bool = opt(False, "Whiten advantages over the whole batch.")

    loss_type: str = opt("policy_loss", "Which loss.", choices=("policy_loss", "sft_loss", "custom_loss"))
    custom_loss_function_path: str | None = opt(
        None, "With --loss-type custom_loss: fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics).", type=str
    )
    custom_pg_loss_reducer_function_path: str | None = opt(
        None,
        "Replaces the mean of the policy loss: fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> callable.",
        type=str,
    )
    eps_clip: float = opt(0.2, "Lower clip distance of the probability ratio.", ge=0)
    eps_clip_high: float | None = opt(None, "Upper clip distance; default: --eps-clip.", type=float, ge=0)
    eps_clip_c: float | None = opt(None, "Dual clip: bound on the ratio for negative advantages.", type=float, gt=1)
    use_kl_loss: bool = opt(False, "Add KL(policy || reference) to the loss.")
    kl_loss_coef: float = opt(0.0, "Its coefficient.", ge=0)
    kl_loss_type: str = opt("k1", "Its estimator.", choices=("k1", "k2", "k3", "low_var_kl"))
    use_unbiased_kl: bool = opt(False, "Weigh the KL term by the probability ratio policy / old policy.")
    entropy_coef: float = opt(0.0, "Coefficient of the entropy bonus.", ge=0)
    loss_aggregation: str = opt(
        "rollout",
        "The mean of token losses: in each rollout, then over rollouts; per sample; over all tokens; by a fixed length (Dr.GRPO).",
        choices=("rollout", "sequence", "token", "constant"),
    )
    calculate_per_token_loss: bool = opt(False, "The same as --loss-aggregation token, under slime's name.")

    use_rollout_logprobs: bool = opt(False, "Take the engine's log-probs as the old policy's, instead of recomputing them.")
    use_rollout_entropy: bool = opt(
        False, "The old policy's entropy of each token as rollout_data['entropy'] for hooks, its mean as the metric rollout/entropy."
    )
    get_mismatch_metrics: bool = opt(False, "Metrics of the importance weights trainer / engine, without using them.")
    use_tis: bool = opt(False, "Weigh the policy loss by the truncated ratio trainer / engine.")
    tis_clip: float = opt(2.0, "Upper bound of that ratio.", gt=0)
    tis_clip_low: float = opt(0.0, "Lower bound of that ratio.", ge=0)
    tis_mode: str = opt(
        "truncate",
        "Ratios outside the bounds: cut from above (truncate: TIS), on both sides (clip), or weight 0 (mask: IcePop, MIS).",
        choices=("truncate", "clip", "mask"),
    )
    tis_level: str = opt(
        "token",
        "The ratio of a token, of its sequence, or its geometric mean.",
        choices=("token", "sequence", "geometric"),
    )
    tis_batch_normalize: bool = opt(False, "Divide the weights by their mean over the trained tokens of the optimizer step.")
    use_rs: bool = opt(False, "Drop what lies outside the bounds of --rs-level.")
    rs_level: str = opt("token", "The ratio that drops.", choices=("token", "sequence", "geometric"))
    rs_lower_bound: float | None = opt(None, "Its lower bound; default: --tis-clip-low.", type=float, ge=0)
    rs_upper_bound: float | None = opt(None, "Its upper bound; default: --tis-clip.", type=float, gt=0)
    rs_veto_threshold: float | None = opt(None, "A token with a ratio below this drops its whole sequence.", type=float, gt=0)
    custom_tis_function_path: str | None = opt(
        None,
        "Replaces the weighting: fn(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, ...) -> (pg_loss, masks, metrics).",
        type=str,
    )
    use_opsm: bool = opt(False, "Off-policy sequence masking: sequences of negative advantage that drifted too far do not count.")
    opsm_delta: float = opt(1e-4, "The drift (mean KL of the sequence) above which they do not.", ge=0)

    use_opd: bool = opt(False, "On-policy distillation: subtract the reverse KL to a teacher from the advantages.")
    opd_type: str | None = opt(
        None,
        "Where the teacher's log-probs come from: an engine, or a copy in the trainer.",
        type=str,
        choices=("vllm", "megatron"),
    )
    opd_kl_coef: float = opt(1.0, "Coefficient of that KL.", ge=0)

    use_routing_replay: bool = opt(False, "MoE: train with the routing of the log-prob pass.")
    use_rollout_routing_replay: bool = opt(False, "MoE: compute the old log-probs and train with the engine's routing.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """The critic of --advantage-estimator ppo; it runs on the trainer's layout."""

    critic_load: str | None = opt(
        None, "Hugging Face folder that the critic starts from; default: --hf-checkpoint.", type=str, path="folder"
    )
    critic_lr: float | None = opt(None, "The critic's learning rate; default: --lr.", type=float, ge=0)
    critic_lr_warmup_iters: int = opt(0, "Its linear warm-up, in optimizer steps.", ge=0)
    num_critic_only_steps: int = opt(0, "First rollout steps in which only the critic is trained.", ge=0)
    value_clip: float = opt(0.2, "Clip distance of new values from old ones.", ge=0)
