"""What Megatron or an engine would refuse only once the run has started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.configs import change, valid_config
from vime.config.megatron_rules import megatron_rules, planned_steps


def said(tmp_path: Path, *tokens: str, given: frozenset[str] = frozenset(), ours: dict[str, Any] | None = None, **values: Any) -> list[str]:
    """The problems of a valid configuration with these values of Megatron's and of ours."""
    config = change(valid_config(tmp_path), **(ours or {}))
    return list(megatron_rules(replace(config, megatron=values, megatron_tokens=tokens, given=given)))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"min_lr": 1.0}, "--min-lr 1 is above --lr 1e-06"),
        ({"lr_warmup_init": 1.0}, "--lr-warmup-init 1 is above --lr 1e-06"),
        ({"lr_warmup_iters": 10, "lr_decay_iters": 10}, "--lr-warmup-iters 10 leaves no step of the 10 optimizer steps"),
        ({"lr_warmup_fraction": 1.0}, "--lr-warmup-fraction 1 leaves no step"),
        ({"recompute_granularity": "full"}, "--recompute-granularity full needs --recompute-method uniform"),
    ],
)
def test_a_schedule_and_recomputation_that_cannot_be_are_told(tmp_path: Path, values: dict[str, Any], expected: str) -> None:
    (problem,) = said(tmp_path, **values)
    assert expected in problem


def test_what_can_be_is_no_problem(tmp_path: Path) -> None:
    assert said(tmp_path, min_lr=1e-7, lr_warmup_iters=9, lr_decay_iters=10) == []
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert said(tmp_path, "--recompute-method", "uniform", "--recompute-num-layers=1", **full) == []
    assert said(tmp_path, "--recompute-modules", "mlp", recompute_activations=True) == []


@pytest.mark.parametrize("flag", ["--recompute-method", "--recompute-num-layers", "--recompute-modules"])
def test_parts_of_recomputation_have_no_effect_alone(tmp_path: Path, flag: str) -> None:
    (problem,) = said(tmp_path, flag, "x")
    assert problem.startswith(f"{flag} has no effect without --recompute-granularity ")


def test_lengths_are_held_against_the_models_positions(tmp_path: Path) -> None:
    given = frozenset({"rollout_max_response_len"})
    (problem,) = said(tmp_path, ours={"rollout_max_context_len": 4096}, max_position_embeddings=2048)
    assert problem == "--rollout-max-context-len 4096 is more than the 2048 positions of the model (config.json): lower it."
    assert said(tmp_path, ours={"rollout_max_context_len": 4096}, max_position_embeddings=2048, rope_type="yarn") == []
    lengths = {"rollout_max_response_len": 64, "rollout_max_context_len": 64}
    (problem,) = said(tmp_path, ours=lengths, given=given)
    assert problem.startswith("--rollout-max-response-len 64 leaves no room for a prompt in --rollout-max-context-len 64")
    assert said(tmp_path, ours=lengths | {"rollout_max_context_len": 65}, given=given) == []
    alone = {"rollout_max_response_len": 64}
    (problem,) = said(tmp_path, ours=alone, given=given, max_position_embeddings=64)
    assert problem.startswith("--rollout-max-response-len 64 leaves no room for a prompt in the 64 positions of the model")
    assert said(tmp_path, ours=alone, given=given, max_position_embeddings=65) == []


def test_steps_are_those_of_all_rollouts(tmp_path: Path) -> None:
    data = valid_config(tmp_path).data
    assert planned_steps(replace(data, num_rollout=3, rollout_batch_size=8, n_samples_per_prompt=2, global_batch_size=4)) == 12
    assert planned_steps(replace(data, num_rollout=None)) is None


@pytest.mark.parametrize(
    ("ours", "values", "flag"),
    [
        ({}, {"pipeline_model_parallel_size": 2}, "--pipeline-model-parallel-size"),
        ({}, {"context_parallel_size": 2}, "--context-parallel-size"),
        ({"use_routing_replay": True}, {}, "--use-routing-replay"),
        ({"custom_model_provider_path": "a.b"}, {}, "--custom-model-provider-path"),
        ({"lora_rank": 8}, {}, "--lora-rank"),
    ],
)
def test_what_multi_token_prediction_does_not_go_with_is_told(
    tmp_path: Path, ours: dict[str, Any], values: dict[str, Any], flag: str
) -> None:
    assert said(tmp_path, ours=ours, **values) == []
    (problem,) = said(tmp_path, ours={**ours, "enable_mtp_training": True}, **values)
    assert problem.startswith(f"--enable-mtp-training is not available together with {flag}")
