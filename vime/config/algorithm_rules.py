"""Rules between the flags of algorithms and losses, and which of them have no effect under which others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from vime.config.estimators import ESTIMATORS
from vime.config.run import RunConfig
from vime.config.sections import ROLLOUT_FUNCTION

__all__ = ["ALGORITHM_EFFECTS", "LOSS_FIELDS", "algorithm_rules"]

LOSS_FIELDS = tuple(
    (  # what only --loss-type policy_loss reads, or a loss of the user's own
        "advantage_estimator rewards_normalization grpo_std_normalization custom_advantage_function_path gamma lambd kl_coef "
        "normalize_advantages eps_clip eps_clip_high eps_clip_c entropy_coef use_rollout_logprobs use_kl_loss ref_load "
        "ref_update_interval use_unbiased_kl custom_pg_loss_reducer_function_path get_mismatch_metrics use_tis tis_clip "
        "tis_clip_low tis_mode tis_level tis_batch_normalize custom_tis_function_path use_rs rs_level rs_lower_bound "
        "rs_upper_bound rs_veto_threshold use_opsm opsm_delta use_rollout_entropy use_routing_replay use_rollout_routing_replay "
        "use_opd opd_type opd_kl_coef opd_teacher_load opd_teacher_url overlong_buffer_len overlong_penalty_factor "
        "custom_megatron_before_log_prob_hook_path"
    ).split()
)


def _estimator(trait: str) -> Callable[[RunConfig], bool]:
    """Whether the estimator lacks `trait`."""
    return lambda c: not getattr(ESTIMATORS[c.algorithm.advantage_estimator], trait)


def _with(trait: str) -> str:
    return _either(name for name, traits in ESTIMATORS.items() if getattr(traits, trait))


def _without(trait: str) -> str:
    return "with --advantage-estimator " + _either(name for name, traits in ESTIMATORS.items() if not getattr(traits, trait))


def _either(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def _reads_reference(config: RunConfig) -> bool:
    return config.algorithm.use_kl_loss or config.algorithm.kl_coef != 0


def _clip_low_unread(config: RunConfig) -> bool:
    """--tis-clip-low is neither a bound of the weights nor of the rejection."""
    alg = config.algorithm
    weights = alg.use_tis and (alg.tis_mode != "truncate" or alg.custom_tis_function_path is not None)
    return not weights and not (alg.use_rs and alg.rs_lower_bound is None)


# (fields, when nobody reads them, what goes on after "--x has no effect ")
ALGORITHM_EFFECTS: tuple[tuple[str, Callable[[RunConfig], bool], str], ...] = (
    (
        "kl_coef",
        _estimator("token_kl"),
        f"{_without('token_kl')}, which give no reward to single tokens: say --use-kl-loss --kl-loss-coef, or use {_with('token_kl')}.",
    ),
    ("gamma", _estimator("discounts"), f"{_without('discounts')}: leave it out, or use {_with('discounts')}."),
    ("lambd", _estimator("critic"), f"{_without('critic')}, which have no critic: leave it out, or use {_with('critic')}."),
    ("eps_clip_c", _estimator("dual_clip"), f"{_without('dual_clip')}, which clips weights and not updates: leave it out."),
    (
        "grpo_std_normalization",
        _estimator("divides"),
        f"{_without('divides')}, which never divide by it: leave it out, or use {_with('divides')}.",
    ),
    (
        "rewards_normalization",
        _estimator("compares"),
        f"{_without('compares')}, which compare nothing in groups: leave it out, or use {_with('compares')}.",
    ),
    (
        "normalize_advantages",
        lambda c: c.algorithm.custom_advantage_function_path is not None,
        "with --custom-advantage-function-path, whose advantages are taken as they are: leave it out.",
    ),
    (
        "kl_loss_type",
        lambda c: not _reads_reference(c),
        "without --use-kl-loss or --kl-coef: leave it out, or add --use-kl-loss with --kl-loss-coef and --ref-load.",
    ),
    ("use_unbiased_kl", lambda c: not c.algorithm.use_kl_loss, "without --use-kl-loss: leave it out, or add that with --kl-loss-coef."),
    ("ref_update_interval", lambda c: not _reads_reference(c), "without --use-kl-loss or --kl-coef: there is no reference. Leave it out."),
    (
        "tis_mode tis_level tis_batch_normalize",
        lambda c: not c.algorithm.use_tis or c.algorithm.custom_tis_function_path is not None,
        "without --use-tis, or with a --custom-tis-function-path that replaces it: leave it out.",
    ),
    (
        "tis_clip",
        lambda c: not c.algorithm.use_tis and not (c.algorithm.use_rs and c.algorithm.rs_upper_bound is None),
        "without --use-tis: leave it out, or add that.",
    ),
    ("tis_clip_low", _clip_low_unread, "without --use-tis --tis-mode clip (or mask): leave it out, or add them."),
    ("custom_tis_function_path", lambda c: not c.algorithm.use_tis, "without --use-tis: leave it out, or add that."),
    (
        "rs_level rs_lower_bound rs_upper_bound rs_veto_threshold",
        lambda c: not c.algorithm.use_rs,
        "without --use-rs: leave it out, or add that.",
    ),
    ("opsm_delta", lambda c: not c.algorithm.use_opsm, "without --use-opsm: leave it out, or add that."),
    (
        "opd_type opd_kl_coef opd_teacher_load opd_teacher_url",
        lambda c: not c.algorithm.use_opd,
        "without --use-opd: leave it out, or add that.",
    ),
    (
        "overlong_penalty_factor",
        lambda c: c.reward.overlong_buffer_len is None,
        "without --overlong-buffer-len: leave it out, or add that.",
    ),
    (
        "loss_aggregation",
        lambda c: c.algorithm.calculate_per_token_loss,
        "with --calculate-per-token-loss, which is --loss-aggregation token: leave one of them out.",
    ),
)


def algorithm_rules(config: RunConfig) -> Iterator[str]:
    """What algorithms need, and what excludes what."""
    alg = config.algorithm
    if (alg.loss_type == "custom_loss") != (alg.custom_loss_function_path is not None):
        yield "--loss-type custom_loss and --custom-loss-function-path go together."
    if alg.loss_type == "sft_loss":
        if alg.compute_advantages_and_returns:
            yield "--loss-type sft_loss uses no advantages: add --disable-compute-advantages-and-returns."
        return
    if alg.loss_type == "policy_loss" and not alg.compute_advantages_and_returns:
        yield "--disable-compute-advantages-and-returns goes with sft_loss or custom_loss: policy_loss needs advantages."
    yield from _rewards(config)
    yield from _reference(config)
    yield from _corrections(config)
    yield from _distillation(config)


def _rewards(config: RunConfig) -> Iterator[str]:
    alg, reward = config.algorithm, config.reward
    traits = ESTIMATORS[alg.advantage_estimator]
    compares = traits.compares and alg.rewards_normalization and reward.custom_reward_post_process_path is None
    alone = config.data.n_samples_per_prompt == 1 and not config.debug.debug_rollout_only
    if compares and alone and alg.loss_type == "policy_loss" and not (traits.whitened or alg.use_opd or alg.custom_advantage_function_path):
        yield "--n-samples-per-prompt 1 gives every sample an advantage of 0: the group's mean is the sample itself. Use 2 or more."
    if not alg.rewards_normalization and not alg.grpo_std_normalization:
        yield "--disable-grpo-std-normalization has no effect with --disable-rewards-normalization: leave it out."
    if traits.whitened and not alg.normalize_advantages and alg.custom_advantage_function_path is None:
        yield f"--advantage-estimator {alg.advantage_estimator} needs --normalize-advantages: its returns are on no scale of their own."
    margin, longest = reward.overlong_buffer_len, config.rollout.rollout_max_response_len
    if margin is not None and margin > longest:
        yield f"--overlong-buffer-len {margin} is more than --rollout-max-response-len {longest}, of which it is the last part."


def _reference(config: RunConfig) -> Iterator[str]:
    alg, folder = config.algorithm, config.model.ref_load
    if alg.use_kl_loss != (alg.kl_loss_coef > 0):
        yield "--use-kl-loss and --kl-loss-coef go together: a coefficient above 0 with the flag, or neither."
    if alg.kl_coef > 0 and alg.use_kl_loss:
        yield "--kl-coef and --use-kl-loss both hold the policy near the reference: leave one of them out."
    if _reads_reference(config) and folder is None and config.lora.lora_rank is None:  # else it is the model without its adapters
        yield f"{'--use-kl-loss' if alg.use_kl_loss else '--kl-coef'} needs --ref-load, the folder of the frozen reference model."
    if folder is not None and not _reads_reference(config):
        yield "--ref-load has no effect without --use-kl-loss: leave it out, or add --use-kl-loss --kl-loss-coef 0.001."


def _corrections(config: RunConfig) -> Iterator[str]:
    alg = config.algorithm
    if alg.use_rollout_logprobs and alg.use_tis:
        yield "--use-rollout-logprobs and --use-tis both correct for the engine's probabilities: leave one of them out."
    if config.model.keep_old_actor and alg.use_routing_replay:
        yield "--keep-old-actor and --use-routing-replay exclude each other: routing is recorded in one pass, with the newest weights."
    if alg.use_rollout_routing_replay:
        yield from _engines_routing(config)
    if config.model.keep_old_actor and alg.use_rollout_entropy:
        yield "--keep-old-actor and --use-rollout-entropy exclude each other: the entropy would be of the newest weights, not of the old."
    low, high = alg.rs_lower_bound, alg.rs_upper_bound
    low, high = alg.tis_clip_low if low is None else low, alg.tis_clip if high is None else high
    if alg.use_rs and low > high:
        yield f"--use-rs keeps ratios from {low:g} to {high:g}, so none: see --rs-lower-bound, --rs-upper-bound."
    if alg.use_tis and alg.tis_clip_low > alg.tis_clip:
        yield f"--tis-clip-low {alg.tis_clip_low:g} is above --tis-clip {alg.tis_clip:g}."


def _engines_routing(config: RunConfig) -> Iterator[str]:
    """What --use-rollout-routing-replay needs of the engines."""
    flag = "--use-rollout-routing-replay"
    if config.algorithm.use_routing_replay:
        yield f"--use-routing-replay has no effect with {flag}, which takes the engine's routing: leave one of them out."
    if config.engine.vllm_enable_deterministic_inference:
        yield f"{flag} excludes --vllm-enable-deterministic-inference: vLLM's routing needs the prefix cache, which that turns off."
    ours = config.rollout.rollout_function_path == ROLLOUT_FUNCTION and config.debug.load_debug_rollout_data is None
    if config.cluster.device == "cpu" and ours:
        yield (
            f"{flag} is not available with engines on a CPU: vLLM returns routing from its Model Runner V2 alone, which needs Triton. "
            "Use --use-routing-replay, or recorded rollouts (--load-debug-rollout-data), or a rollout function of your own."
        )


def _distillation(config: RunConfig) -> Iterator[str]:
    alg, model = config.algorithm, config.model
    if not alg.use_opd:
        return
    if alg.opd_type is None:
        yield "--use-opd needs --opd-type: megatron (a copy in the trainer) or vllm (an engine)."
    for kind, flag, value in (
        ("megatron", "--opd-teacher-load", model.opd_teacher_load),
        ("vllm", "--opd-teacher-url", model.opd_teacher_url),
    ):
        if alg.opd_type == kind and value is None:
            yield f"--opd-type {kind} needs {flag}, which says where the teacher is."
        if alg.opd_type != kind and value is not None:
            yield f"{flag} has no effect without --opd-type {kind}: leave it out."
