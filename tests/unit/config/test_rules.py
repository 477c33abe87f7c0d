"""Rules between flags: each broken rule is one sentence that names the flags and the cure."""

import dataclasses
import re

import pytest

from tests.unit.config.configs import change, valid_config
from vime.config import RunConfig
from vime.config.rules import check_rules
from vime.errors import ConfigError


@pytest.fixture
def valid(tmp_path):
    return valid_config(tmp_path)


def test_a_plain_run_is_valid(valid):
    check_rules(valid)


def test_with_adapters_the_reference_needs_no_folder(valid):
    check_rules(change(valid, use_kl_loss=True, kl_loss_coef=0.1, lora_rank=8))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_epoch": 1}, "one of --num-rollout"),
        (
            {"use_fault_tolerance": True, "max_weight_staleness": 2, "update_weights_interval": 2, "rollout_num_gpus": 1},
            "--use-fault-tolerance with one engine and --update-weights-interval 2",
        ),
        (
            {"use_rollout_routing_replay": True, "use_routing_replay": True},
            "--use-routing-replay has no effect with --use-rollout-routing-replay",
        ),
        ({"use_rollout_routing_replay": True}, "is not available with engines on a CPU: vLLM returns routing from its Model Runner V2"),
        (
            {"use_rollout_routing_replay": True, "vllm_enable_deterministic_inference": True, "rollout_function_path": "a.b"},
            "needs the prefix cache, which that turns off",
        ),
        ({"log_probs_chunk_size": 0}, "--log-probs-chunk-size 0 is no number of rows: use 1 or more, or -1"),
        ({"num_rollout": None}, "one of --num-rollout"),
        ({"n_samples_per_prompt": 1}, "advantage of 0"),
        ({"global_batch_size": 3}, "--global-batch-size 3 does not divide the 8 rollouts"),
        ({"global_batch_size": 4, "num_steps_per_rollout": 2}, "one of --global-batch-size and --num-steps-per-rollout"),
        ({"use_dynamic_batch_size": True}, "--max-tokens-per-gpu go together"),
        ({"max_tokens_per_gpu": 100}, "go together"),
        ({"use_dynamic_batch_size": True, "max_tokens_per_gpu": 9, "micro_batch_size": 2}, "--micro-batch-size has no effect"),
        ({"over_sampling_batch_size": 2}, "must be at least --rollout-batch-size 4"),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, "--use-kl-loss needs --ref-load"),
        ({"kl_loss_coef": 0.1}, "go together"),
        ({"lora_rank": 8, "freeze_params_name_list": ["mlp"]}, "--lora-rank freezes the whole model"),
        (
            {"lora_rank": 8, "lora_sync": "adapter", "update_weight_in_flight": True, "max_weight_staleness": 1},
            "--update-weight-in-flight with --lora-sync adapter is not available",
        ),
        ({"lora_rank": 600, "lora_sync": "adapter"}, "engines take adapters up to rank 512"),
        (
            {"lora_rank": 8, "use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 2},
            "--ref-update-interval with --lora-rank is not available",
        ),
        ({"loss_type": "sft_loss"}, "add --disable-compute-advantages-and-returns"),
        ({"loss_type": "custom_loss"}, "--custom-loss-function-path go together"),
        ({"compute_advantages_and_returns": False}, "policy_loss needs advantages"),
        ({"debug_train_only": True}, "default that needs them"),
        ({"custom_rm_path": "a.b"}, "both give the reward"),
        ({"group_rm": True}, "--group-rm needs --custom-rm-path"),
        ({"eval_interval": 1}, "--eval-interval has no effect without --eval-prompt-data"),
        ({"eval_prompt_data": ["name"]}, "takes pairs"),
        ({"eval_prompt_data": ["a", "x", "b", "y", "a", "z"]}, "gives the name a to several files"),
        ({"num_rollout": 0}, "needs --eval-prompt-data"),
        ({"save_interval": 1}, "--save-interval has no effect without --save"),
        ({"vllm_router_ip": "127.0.0.1"}, "go together"),
        ({"rollout_top_p": 0.9}, "--rollout-top-p 0.9 needs --rollout-top-k"),
        ({"save_hf": "x/{step}"}, "--save-hf 'x/{step}': only {rollout_id} can be filled in"),
        ({"save_hf": "x/{}"}, "only {rollout_id} can be filled in"),
        ({"save_hf": "x/{rollout_id.real}"}, "only {rollout_id} can be filled in"),
        ({"save_hf": "x/{rollout_id"}, "its braces cannot be read"),
        ({"save_hf": "x/{rollout_id:y}"}, "its braces cannot be read"),
        ({"hf_checkpoint": "/nowhere"}, "is not a folder"),
        ({"prompt_data": "/nowhere.jsonl"}, "does not exist"),
        ({"device": "cuda"}, "not available yet"),
        ({"colocate": True}, "--colocate has no effect with --device cpu"),
        (
            {"device": "cuda", "colocate": True, "update_weights_interval": 2},
            "--update-weights-interval 2 lets engines go on with the weights that they have, and with --colocate they forget them",
        ),
        ({"device": "cuda", "offload_train": True}, "--offload-train has no effect without --colocate"),
        ({"rollout_num_gpus": 0}, "starts no engine"),
        ({"rollout_external_engine_addrs": ["8101"]}, "takes host:port, got '8101'"),
        (
            {"rollout_external_engine_addrs": ["10.0.0.7:8101"]},
            "through this machine's shared memory. Start the engine here (vime engine --port 8101 ...) and give 127.0.0.1:8101",
        ),
        ({"rollout_external_engine_addrs": ["localhost:1", "localhost:1"]}, "names an engine twice"),
        ({"rollout_external_engine_addrs": ["localhost:1"], "rollout_num_gpus": 1}, "some that run already: leave one out"),
        ({"rollout_external_engine_addrs": ["localhost:1"], "vllm_config": "x.yaml"}, "--vllm-config starts engines"),
        ({"vllm_config": "x.yaml", "rollout_num_gpus": 1}, "both say how many engines there are"),
        ({"rollout_health_check_interval": 5.0}, "no effect without --use-fault-tolerance"),
        ({"train_env_vars": {"NCCL_DEBUG": 1}}, "got 'NCCL_DEBUG': 1"),
        ({"train_env_vars": {"A=B": "x"}}, "got 'A=B': 'x'"),
        ({"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2}, "--rollout-num-gpus 3 is no multiple"),
    ],
)
def test_each_broken_rule_says_the_cure(valid, values, message):
    with pytest.raises(ConfigError) as error:
        check_rules(change(valid, **values))
    assert message in str(error.value)


def test_a_policy_that_needs_two_engines_is_refused_with_one(valid):
    for tokens in (("--policy", "power_of_two"), ("--policy=power_of_two",)):
        with pytest.raises(ConfigError, match="power_of_two chooses between two engines, and 'actor' has 1"):
            check_rules(dataclasses.replace(valid, router_tokens=tokens))
        check_rules(change(dataclasses.replace(valid, router_tokens=tokens), rollout_num_gpus=2))
    check_rules(dataclasses.replace(valid, router_tokens=("--policy", "power_of_two", "--policy", "random")))


def test_an_empty_prompt_file_is_refused(valid, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        check_rules(change(valid, prompt_data=str(tmp_path / "empty.jsonl")))


def test_trainers_must_divide_by_the_model_parallel_size(valid):
    config = dataclasses.replace(change(valid, actor_num_gpus_per_node=3), megatron={"tensor_model_parallel_size": 2})
    with pytest.raises(ConfigError, match="cannot be divided"):
        check_rules(config)


@pytest.mark.parametrize("template", ["hf", "hf/{rollout_id}", "hf/{rollout_id:06d}", "hf/{{x}}"])
def test_a_folder_name_may_hold_the_rollout_id(valid, template):
    check_rules(change(valid, save="run", save_hf=template))


def test_one_sample_a_prompt_is_enough_for_a_reward_processing_of_ones_own(valid):
    check_rules(change(valid, n_samples_per_prompt=1, custom_reward_post_process_path="a.b"))


def test_prompts_are_needed_by_our_own_data_source_only(valid):
    with pytest.raises(ConfigError, match="--prompt-data is required"):
        check_rules(change(valid, prompt_data=None))
    check_rules(change(valid, prompt_data=None, data_source_path="a.B"))


def test_held_out_prompts_alone_are_evaluated_before_and_after(valid, tmp_path):
    (tmp_path / "held.jsonl").write_text('{"input": "1"}\n')
    check_rules(change(valid, eval_prompt_data=["held", str(tmp_path / "held.jsonl")]))


@pytest.mark.parametrize("token", ["--max-num-seqs=8", "--max_num_seqs", "--enable-prefix-caching"])
def test_engine_flags_that_undo_determinism_are_refused(valid, token):
    config = dataclasses.replace(valid, vllm_tokens=(token,))
    check_rules(config)
    with pytest.raises(ConfigError, match="contradicts --vllm-enable-deterministic-inference"):
        check_rules(change(config, vllm_enable_deterministic_inference=True))


def test_engine_flags_that_agree_with_determinism_are_taken(valid):
    check_rules(dataclasses.replace(change(valid, vllm_enable_deterministic_inference=True), vllm_tokens=("--no-enable-prefix-caching",)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capsule_steps": [1]}, "--capsule-steps needs a place"),
        ({"capsule_steps": [1, 2], "save": "run", "num_rollout": 2}, "--capsule-steps 2 is never reached with --num-rollout 2"),
        ({"save_debug_train_data": "a.pt"}, "--save-debug-train-data 'a.pt' names one file for all steps"),
        ({"save_debug_train_data": "{step}"}, "only {rollout_id} can be filled in"),
    ],
)
def test_records_need_a_place_of_their_own(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_rules(change(valid_config(tmp_path), **changes))


def test_details_go_into_one_folder_whose_braces_are_its_own():
    config = change(RunConfig(), dump_details="a{b}")
    assert config.rollout_dump.format(rollout_id=3) == "a{b}/rollout_data/3.jsonl"
    assert config.train_dump.format(rollout_id=3) == "a{b}/train_data/3.pt"
    assert RunConfig().train_dump is None


def test_recorded_rollouts_may_tell_an_engines_routing_on_a_cpu(valid):
    for values in ({"rollout_function_path": "a.b"}, {"load_debug_rollout_data": "r_{rollout_id}.jsonl", "rm_type": "math"}):
        check_rules(change(valid, use_rollout_routing_replay=True, **values))


@pytest.mark.parametrize("values", [{"colocate": True, "offload_rollout": False}, {"colocate": True, "update_weights_interval": 1}, {}])
def test_engines_that_keep_their_weights_need_not_get_them_after_each_step(valid, values):
    check_rules(change(valid, **{"device": "cuda", "update_weights_interval": 2, **values}), planned=True)
