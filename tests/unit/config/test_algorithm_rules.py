"""What algorithms need and exclude, and which of their flags have no effect: each is refused with the cure."""

import pytest

from tests.unit.config.configs import change, valid_config
from vime.config.effects import unused_flags
from vime.config.estimators import ESTIMATORS
from vime.config.rules import check_rules
from vime.errors import ConfigError

WHITENED = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True}
BASELINE = {"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True}


@pytest.fixture
def valid(tmp_path):
    return valid_config(tmp_path)


@pytest.mark.parametrize(
    ("base", "values", "flag", "cure"),
    [
        ({}, {"kl_coef": 0.1}, "--kl-coef", "--use-kl-loss"),
        ({"advantage_estimator": "rloo"}, {"kl_coef": 0.1}, "--kl-coef", "reinforce_plus_plus"),
        ({}, {"gamma": 0.9}, "--gamma", "reinforce_plus_plus"),
        (BASELINE, {"gamma": 0.9}, "--gamma", "reinforce_plus_plus"),
        (WHITENED, {"lambd": 0.9}, "--lambd", "ppo"),
        ({"advantage_estimator": "cispo"}, {"eps_clip_c": 3.0}, "--eps-clip-c", "leave it out"),
        ({"advantage_estimator": "rloo"}, {"grpo_std_normalization": False}, "--disable-grpo-std-normalization", "grpo"),
        (WHITENED, {"rewards_normalization": False}, "--disable-rewards-normalization", "grpo"),
        ({}, {"kl_loss_type": "k3"}, "--kl-loss-type", "--use-kl-loss"),
        ({}, {"use_unbiased_kl": True}, "--use-unbiased-kl", "--use-kl-loss"),
        ({}, {"ref_update_interval": 2}, "--ref-update-interval", "--use-kl-loss"),
        ({}, {"tis_clip": 3.0}, "--tis-clip", "--use-tis"),
        ({"use_tis": True}, {"tis_clip_low": 0.5}, "--tis-clip-low", "--tis-mode clip"),
        ({}, {"tis_level": "sequence"}, "--tis-level", "--use-tis"),
        ({}, {"tis_batch_normalize": True}, "--tis-batch-normalize", "--use-tis"),
        ({"use_tis": True, "custom_tis_function_path": "a.b"}, {"tis_mode": "mask"}, "--tis-mode", "--custom-tis-function-path"),
        ({}, {"custom_tis_function_path": "a.b"}, "--custom-tis-function-path", "--use-tis"),
        ({}, {"rs_upper_bound": 3.0}, "--rs-upper-bound", "--use-rs"),
        ({}, {"opsm_delta": 0.1}, "--opsm-delta", "--use-opsm"),
        ({}, {"opd_kl_coef": 0.1}, "--opd-kl-coef", "--use-opd"),
        ({}, {"overlong_penalty_factor": 0.5}, "--overlong-penalty-factor", "--overlong-buffer-len"),
        ({"calculate_per_token_loss": True}, {"loss_aggregation": "sequence"}, "--loss-aggregation", "--calculate-per-token-loss"),
    ],
)
def test_a_knob_without_effect_is_refused(valid, base, values, flag, cure):
    assert list(unused_flags(change(valid, **base))) == []
    (problem,) = unused_flags(change(valid, **(base | values)))
    assert problem.startswith(f"{flag} has no effect ")
    assert cure in problem


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"advantage_estimator": "reinforce_plus_plus"}, "needs --normalize-advantages"),
        ({"advantage_estimator": "rloo", "n_samples_per_prompt": 1}, "advantage of 0"),
        (WHITENED | {"kl_coef": 0.1}, "--kl-coef needs --ref-load"),
        (WHITENED | {"kl_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1}, "leave one of them out"),
        ({"use_tis": True, "use_rollout_logprobs": True}, "both correct"),
        ({"use_tis": True, "tis_mode": "clip", "tis_clip_low": 3.0}, "--tis-clip-low 3 is above --tis-clip 2"),
        ({"use_rs": True, "rs_lower_bound": 5.0}, "keeps ratios from 5 to 2, so none"),
        ({"use_opd": True}, "--use-opd needs --opd-type"),
        ({"use_opd": True, "opd_type": "megatron"}, "needs --opd-teacher-load"),
        ({"use_opd": True, "opd_type": "vllm"}, "needs --opd-teacher-url"),
        (
            {"use_opd": True, "opd_type": "vllm", "opd_teacher_url": "http://h:1", "opd_teacher_load": "/"},
            "--opd-teacher-load has no effect",
        ),
        ({"overlong_buffer_len": 2000}, "--overlong-buffer-len 2000 is more than --rollout-max-response-len"),
    ],
)
def test_each_broken_rule_says_the_cure(valid, values, message):
    with pytest.raises(ConfigError, match=message):
        check_rules(change(valid, **values))


@pytest.mark.parametrize("name", [name for name, traits in ESTIMATORS.items() if not traits.critic])
def test_each_estimator_runs_with_what_it_needs(valid, name):
    check_rules(change(valid, advantage_estimator=name, normalize_advantages=ESTIMATORS[name].whitened))


def test_one_sample_a_prompt_is_enough_where_nothing_is_compared(valid):
    check_rules(change(valid, n_samples_per_prompt=1, **WHITENED))
