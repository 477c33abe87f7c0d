"""Flags without effect are refused, with the setting that would use them."""

import dataclasses
import re

import pytest

from tests.unit.config.configs import change, valid_config
from vime.config import SECTIONS
from vime.config.effects import _UNUSED, unused_flags
from vime.config.fields import flag_specs
from vime.config.parse import flag_table
from vime.config.rules import check_rules
from vime.config.sections import SFT_FUNCTION
from vime.errors import ConfigError

SFT = {
    "debug_train_only": True,
    "rollout_function_path": SFT_FUNCTION,
    "loss_type": "sft_loss",
    "compute_advantages_and_returns": False,
    "rm_type": None,
}


ALWAYS = frozenset(  # fields that some part of every run reads, or that the user's own functions and rows decide about
    (
        "device hf_checkpoint prompt_data input_key label_key metadata_key tool_key multimodal_keys apply_chat_template "
        "apply_chat_template_kwargs bad_row_policy rollout_shuffle rollout_seed num_rollout num_epoch rollout_batch_size "
        "n_samples_per_prompt global_batch_size num_steps_per_rollout use_dynamic_batch_size max_tokens_per_gpu data_source_path "
        "rollout_function_path rollout_max_context_len rollout_max_prompt_len rollout_deadline "
        "custom_convert_samples_to_train_data_path eval_prompt_data eval_config "
        "compute_advantages_and_returns save load use_tensorboard use_wandb log_samples log_dir log_passrate log_multi_turn "
        "log_reward_category log_correct_samples custom_rollout_log_function_path debug_train_only debug_rollout_only "
        "load_debug_rollout_data dump_details"
    ).split()
)
EVAL = {"eval_prompt_data": ["held", "held.jsonl"]}


@pytest.fixture
def valid(tmp_path):
    return valid_config(tmp_path)


@pytest.mark.parametrize("base", [{}, SFT, {"debug_rollout_only": True}], ids=["grpo", "sft", "rollout_only"])
def test_a_run_without_needless_flags_is_valid(valid, base):
    check_rules(change(valid, **base))


@pytest.mark.parametrize(
    ("base", "values", "flag", "cure"),
    [
        ({}, {"tb_project_name": "x"}, "--tb-project-name", "--use-tensorboard"),
        ({}, {"eval_interval": 2}, "--eval-interval", "--eval-prompt-data"),
        ({}, {"rm_url": "http://localhost"}, "--rm-url", "--rm-type remote_rm"),
        ({}, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 9, "micro_batch_size": 2}, "--micro-batch-size", "--use-dynamic"),
        (EVAL, {"eval_temperature": 0.0, "eval_top_p": 0.5}, "--eval-top-p", "--eval-temperature 0"),
        (EVAL | {"num_rollout": 0}, {"eval_interval": 1}, "--eval-interval", "--num-rollout 0"),
        ({}, {"keep_checkpoints": 3}, "--keep-checkpoints", "--save"),
        ({}, {"async_save": True}, "--async-save", "--save"),
        ({"debug_rollout_only": True}, {"save": "run", "async_save": True}, "--async-save", "--debug-rollout-only"),
        ({}, {"ckpt_step": 3}, "--ckpt-step", "--load"),
        ({}, {"mtp_loss_scaling_factor": 0.1}, "--mtp-loss-scaling-factor", "--enable-mtp-training"),
        ({}, {"mtp_num_layers": 1}, "--mtp-num-layers", "--enable-mtp-training"),
        ({}, {"no_load_optim": True}, "--no-load-optim", "--load"),
        ({}, {"eval_temperature": 0.0}, "--eval-temperature", "--eval-prompt-data"),
        ({}, {"eval_reward_key": "x"}, "--eval-reward-key", "--eval-prompt-data"),
        ({}, {"n_samples_per_eval_prompt": 2}, "--n-samples-per-eval-prompt", "--eval-prompt-data"),
        ({}, {"skip_eval_before_train": True}, "--skip-eval-before-train", "--eval-prompt-data"),
        ({}, {"kl_loss_type": "k3"}, "--kl-loss-type", "--use-kl-loss"),
        ({}, {"loss_mask_type": "qwen3"}, "--loss-mask-type", SFT_FUNCTION),
        ({}, {"recompute_loss_function": True}, "--recompute-loss-function", "--loss-type custom_loss"),
        ({"use_stateless_adam": True}, {"reset_optimizer_states": True}, "--reset-optimizer-states", "--use-stateless-adam"),
        (SFT, {"use_rollout_entropy": True}, "--use-rollout-entropy", "--loss-type sft_loss"),
        (SFT, {"custom_megatron_before_log_prob_hook_path": "a.b"}, "--custom-megatron-before-log-prob-hook-path", "--loss-type sft_loss"),
        ({}, {"partial_rollout": True}, "--partial-rollout", "--over-sampling-batch-size"),
        ({}, {"mask_offpolicy_in_partial_rollout": True}, "--mask-offpolicy-in-partial-rollout", "--partial-rollout"),
        (
            {"vllm_enable_deterministic_inference": True, "over_sampling_batch_size": 8},
            {"partial_rollout": True},
            "--partial-rollout",
            "--vllm-enable-deterministic-inference",
        ),
        (
            {"custom_convert_samples_to_train_data_path": "a.b"},
            {"custom_reward_post_process_path": "a.b"},
            "--custom-reward-post-process-path",
            "--custom-convert-samples-to-train-data-path",
        ),
        (SFT, {"entropy_coef": 0.1}, "--entropy-coef", "--loss-type sft_loss"),
        (SFT, {"eps_clip": 0.1}, "--eps-clip", "--loss-type sft_loss"),
        (SFT, {"eps_clip_high": 0.1}, "--eps-clip-high", "--loss-type sft_loss"),
        (SFT, {"normalize_advantages": True}, "--normalize-advantages", "--loss-type sft_loss"),
        (SFT, {"use_rollout_logprobs": True}, "--use-rollout-logprobs", "--loss-type sft_loss"),
        (SFT, {"use_kl_loss": True}, "--use-kl-loss", "--loss-type sft_loss"),
        (SFT, {"rollout_num_gpus": 1}, "--rollout-num-gpus", "--debug-train-only"),
        (SFT, {"vllm_enable_deterministic_inference": True}, "--vllm-enable-deterministic-inference", "--debug-train-only"),
        (SFT, {"vllm_server_concurrency": 4}, "--vllm-server-concurrency", "--debug-train-only"),
        (SFT, {"weight_proof_tolerance": 0.1}, "--weight-proof-tolerance", "--debug-train-only"),
        (SFT, {"update_weight_deadline": 9.0}, "--update-weight-deadline", "--debug-train-only"),
        (SFT, {"rm_type": "math"}, "--rm-type", "--debug-train-only"),
        (SFT, {"custom_rm_path": "a.b"}, "--custom-rm-path", "--debug-train-only"),
        (SFT, {"rollout_temperature": 0.5}, "--rollout-temperature", "--loss-type sft_loss"),
        (SFT, {"rollout_top_p": 0.5}, "--rollout-top-p", "--debug-train-only"),
        ({"debug_rollout_only": True}, {"lr": 0.5}, "--lr", "--debug-rollout-only"),
        ({"debug_rollout_only": True}, {"actor_num_gpus_per_node": 2}, "--actor-num-gpus-per-node", "--debug-rollout-only"),
        ({"debug_rollout_only": True}, {"clip_grad": 0.5}, "--clip-grad", "--debug-rollout-only"),
        ({"debug_rollout_only": True}, {"train_threads": 1}, "--train-threads", "--debug-rollout-only"),
        ({"debug_rollout_only": True}, {"eps_clip": 0.1}, "--eps-clip", "--debug-rollout-only"),
        ({"debug_rollout_only": True}, {"save": "run", "save_hf": "hf"}, "--save-hf", "--debug-rollout-only"),
    ],
)
def test_a_flag_without_effect_is_named_with_the_setting_that_decides(valid, base, values, flag, cure):
    assert list(unused_flags(change(valid, **base))) == []
    (problem,) = unused_flags(change(valid, **(base | values)))
    assert problem.startswith(f"{flag} has no effect ")
    assert cure in problem


def test_a_typed_default_counts(valid):
    (problem,) = unused_flags(dataclasses.replace(valid, given=frozenset({"keep_checkpoints"})))
    assert problem.startswith("--keep-checkpoints has no effect without --save")


def test_a_rollout_function_of_ones_own_may_read_rewards_and_sampling(valid):
    own = {"debug_train_only": True, "rollout_function_path": "a.b", "rollout_top_p": 0.5, "loss_mask_type": "qwen3"}
    check_rules(change(valid, **own))


def test_flags_of_one_setting_share_a_sentence(valid):
    (problem,) = unused_flags(change(valid, eval_top_k=1, eval_top_p=0.5))
    assert problem.startswith("--eval-top-p, --eval-top-k have no effect without --eval-prompt-data")


def test_megatrons_flags_have_no_effect_without_a_trainer(valid):
    config = dataclasses.replace(change(valid, debug_rollout_only=True), megatron_tokens=("--weight-decay", "0.1"))
    (problem,) = unused_flags(config)
    assert "--weight-decay" in problem
    assert "--debug-rollout-only" in problem


def test_a_reward_that_rows_name_may_use_the_address(valid):
    check_rules(change(valid, rm_type=None, rm_url="http://localhost"))
    check_rules(change(valid, rm_type="boxed_remote_rm", rm_url="http://localhost"))


def test_the_table_names_fields_and_flags_that_exist():
    known = {spec.name for section in SECTIONS.values() for spec in flag_specs(section)}
    flags = flag_table()
    for entry in _UNUSED:
        assert set(entry.fields) <= known, entry
        assert set(re.findall(r"--[a-z][\w-]*", entry.why)) <= set(flags), entry


def test_each_field_is_in_the_table_or_read_by_every_run():
    listed = {name for entry in _UNUSED for name in entry.fields}
    known = {spec.name for section in SECTIONS.values() for spec in flag_specs(section)}
    assert known >= ALWAYS, f"gone, take them off the list: {sorted(ALWAYS - known)}"
    assert not ALWAYS & listed, f"in the table now, take them off the list: {sorted(ALWAYS & listed)}"
    assert not known - listed - ALWAYS, f"when does nobody read these? Say it in effects.py: {sorted(known - listed - ALWAYS)}"


def test_every_setting_of_the_table_can_be_and_not_be(valid):
    runs = [
        valid,
        change(valid, **SFT),
        change(valid, debug_rollout_only=True, load="other", enable_mtp_training=True),
        change(valid, use_tensorboard=True, save="run", use_wandb=True, wandb_group="g", use_dynamic_batch_size=True, use_kl_loss=True),
        change(valid, **EVAL, eval_temperature=0.0, num_rollout=0, rollout_function_path="a.b", rm_type="remote_rm", lora_rank=8),
        change(valid, partial_rollout=True, max_weight_staleness=1, use_fault_tolerance=True, device="cuda", advantage_estimator="ppo"),
        change(valid, vllm_enable_deterministic_inference=True, custom_convert_samples_to_train_data_path="a.b"),
        change(valid, advantage_estimator="cispo", use_tis=True, use_opsm=True, use_opd=True, overlong_buffer_len=8),
        change(valid, use_tis=True, tis_mode="clip", use_rs=True, calculate_per_token_loss=True, custom_advantage_function_path="a.b"),
        change(valid, loss_type="custom_loss", custom_loss_function_path="a.b", use_stateless_adam=True),
        change(valid, update_weight_transport="disk", update_weight_mode="delta", load_debug_rollout_data="x", dump_details="x"),
        change(valid, capsule_steps=[0]),
        change(valid, device="cuda", colocate=True),
    ]
    for entry in _UNUSED:
        assert {entry.when(run) for run in runs} == {True, False}, entry


def test_what_is_not_available_is_named_once_and_without_a_cure_that_is_not_available_either(valid):
    with pytest.raises(ConfigError) as error:
        check_rules(change(valid, wandb_project="p", colocate=True, device="cuda"))
    problems = error.value.problems
    assert sorted(problem.split()[0] for problem in problems) == ["--device", "--wandb-project"]
    assert all("is not available yet" in problem for problem in problems)


def test_a_plan_may_hold_what_is_not_available(valid):
    check_rules(change(valid, colocate=True, device="cuda", offload_train=True, actor_num_nodes=4), planned=True)
    with pytest.raises(ConfigError, match="--wandb-project has no effect without --use-wandb"):
        check_rules(change(valid, wandb_project="p"), planned=True)


def test_a_field_with_two_flags_is_called_by_the_one_that_was_meant(valid):
    for value, flag in ((True, "--offload-train"), (False, "--no-offload-train")):
        with pytest.raises(ConfigError) as error:
            check_rules(change(valid, offload_train=value))
        assert [problem.split()[0] for problem in error.value.problems] == [flag]
