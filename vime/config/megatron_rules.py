"""Rules between our flags and what Megatron's parser resolved: what it, or an engine, would refuse only once the run has started."""

from __future__ import annotations

from collections.abc import Iterator

from vime.config.run import RunConfig
from vime.config.sections import DataConfig

__all__ = ["megatron_rules", "planned_steps"]


def megatron_rules(config: RunConfig) -> Iterator[str]:
    """One sentence for each."""
    if not config.debug.debug_rollout_only:
        yield from _schedule(config)
        yield from _recomputed(config)
        yield from _prediction(config)
    yield from _lengths(config)


def planned_steps(data: DataConfig) -> int | None:
    """Optimizer steps of the whole run, or None when --num-rollout does not say."""
    if data.num_rollout is None:
        return None
    rollouts = (data.rollout_batch_size or 1) * data.n_samples_per_prompt
    per_rollout = data.num_steps_per_rollout or max(1, round(rollouts / data.global_batch_size) if data.global_batch_size else 1)
    return data.num_rollout * per_rollout


def _schedule(config: RunConfig) -> Iterator[str]:
    lr = config.training.lr
    for name in ("min_lr", "lr_warmup_init"):
        if (value := config.megatron.get(name) or 0.0) > lr:
            yield f"--{name.replace('_', '-')} {value:g} is above --lr {lr:g}, the highest rate of the run: lower it."
    steps = config.megatron.get("lr_decay_iters") or config.megatron.get("train_iters") or planned_steps(config.data)
    share = config.megatron.get("lr_warmup_fraction")
    warmup = config.megatron.get("lr_warmup_iters") or 0
    if share is not None and share >= 1:
        yield f"--lr-warmup-fraction {share:g} leaves no step after the warm-up: it is a share of the optimizer steps below 1."
    elif share is None and steps and warmup >= steps:
        yield f"--lr-warmup-iters {warmup} leaves no step of the {steps} optimizer steps over which the learning rate runs: lower it."


def _recomputed(config: RunConfig) -> Iterator[str]:
    typed = {token.partition("=")[0] for token in config.megatron_tokens if token.startswith("--")}
    found = config.megatron
    granularity = "selective" if found.get("recompute_activations") else found.get("recompute_granularity")
    if granularity == "full":
        missing = [name for name in ("recompute_method", "recompute_num_layers") if found.get(name) is None]
        if missing:
            yield "--recompute-granularity full needs --recompute-method uniform --recompute-num-layers 1 (layers of one piece)."
    for flag, needed in (("--recompute-method", "full"), ("--recompute-num-layers", "full"), ("--recompute-modules", "selective")):
        if flag in typed and granularity != needed:
            yield f"{flag} has no effect without --recompute-granularity {needed}: leave it out, or add that."


def _prediction(config: RunConfig) -> Iterator[str]:
    """What the layers for multi-token prediction do not go with yet."""
    if not config.training.enable_mtp_training:
        return
    others = {
        "--pipeline-model-parallel-size": (config.megatron.get("pipeline_model_parallel_size") or 1) > 1,
        "--context-parallel-size": (config.megatron.get("context_parallel_size") or 1) > 1,
        "--use-routing-replay": config.algorithm.use_routing_replay,
        "--custom-model-provider-path": config.model.custom_model_provider_path is not None,
        "--lora-rank": config.lora.lora_rank is not None,
    }
    for flag in (flag for flag, given in others.items() if given):
        yield f"--enable-mtp-training is not available together with {flag}: leave one of them out."


def _lengths(config: RunConfig) -> Iterator[str]:
    """Lengths of sequences against the model's positions. YaRN stretches those, so that the number says nothing there."""
    positions = None if config.megatron.get("rope_type") == "yarn" else config.megatron.get("max_position_embeddings")
    rollout = config.rollout
    context = rollout.rollout_max_context_len
    if positions and context is not None and context > positions:
        yield f"--rollout-max-context-len {context} is more than the {positions} positions of the model (config.json): lower it."
    response = rollout.rollout_max_response_len
    if positions and context is None and "rollout_max_response_len" in config.given and response >= positions:
        yield (
            f"--rollout-max-response-len {response} leaves no room for a prompt in the {positions} positions of the model (config.json): "
            "lower it."
        )
    if context is not None and "rollout_max_response_len" in config.given and response >= context:
        yield f"--rollout-max-response-len {response} leaves no room for a prompt in --rollout-max-context-len {context}: lower it."
