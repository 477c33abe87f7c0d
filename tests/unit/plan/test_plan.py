"""Whole plans of GPU runs: who is where, what does not fit and what is offered instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.plan.configs import settings
from vime.errors import ConfigError
from vime.plan import engine, trainer
from vime.plan.footprint import Footprint
from vime.plan.placement import devices, hosts, processes
from vime.plan.plan import engine_advice, make_plan, refusals
from vime.plan.search import offers
from vime.plan.settings import PlanOptions, Settings

GIB = 2**30


def phase(footprint: Footprint, name: str) -> dict[tuple[str, str], int]:
    return {(item.role, item.name): item.num_bytes for item in footprint.phases[name]}


def test_ranks_have_megatrons_coordinates_and_engines_stand_behind_them(tmp_path: Path) -> None:
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    s = settings(tmp_path, "qwen3-4b", layout, actor_num_gpus_per_node=8, rollout_num_gpus=8, rollout_num_gpus_per_engine=2)
    found = {process.name: process for process in processes(s)}
    assert found["trainer 3"].coordinates == {"tp": 1, "cp": 0, "dp": 1, "pp": 0}
    assert found["trainer 4"].coordinates == {"tp": 0, "cp": 0, "dp": 0, "pp": 1}
    assert [(found[f"engine {i}"].node, found[f"engine {i}"].gpus) for i in range(4)] == [
        (1, (0, 1)),
        (1, (2, 3)),
        (1, (4, 5)),
        (1, (6, 7)),
    ]
    assert {"driver", "rollout manager", "router"} <= set(found)


def test_engines_take_the_gpus_that_the_trainers_leave_and_stay_on_one_node(tmp_path: Path) -> None:
    s = settings(tmp_path, "qwen3-4b", actor_num_gpus_per_node=5, actor_num_nodes=2, rollout_num_gpus=6, rollout_num_gpus_per_engine=2)
    found = [(process.node, process.gpus) for process in processes(s) if process.role == "engine"]
    assert found == [(0, (5, 6)), (1, (5, 6)), (2, (0, 1))]


def test_every_trainer_rank_has_its_own_coordinates(tmp_path: Path) -> None:
    layout = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "pipeline_model_parallel_size": 2}
    s = settings(tmp_path, "qwen3-4b", layout, actor_num_gpus_per_node=8, actor_num_nodes=2)
    places = [tuple(process.coordinates.values()) for process in processes(s) if process.role == "trainer"]
    assert len(set(places)) == len(places) == 16


def test_colocated_each_phase_holds_its_own(tmp_path: Path) -> None:
    s = settings(tmp_path, "qwen3-4b", actor_num_gpus_per_node=8, colocate=True, rollout_num_gpus=8)
    (gpu,) = devices(s)
    assert gpu.count == 8
    train, rollout, sync = (phase(gpu, name) for name in ("train", "rollout", "sync"))
    assert ("trainer", "optimizer") in train
    assert ("engine", "KV cache") not in train
    assert ("trainer", "optimizer") not in rollout
    assert ("engine", "KV cache") in rollout
    assert ("trainer", "weights") in sync
    assert ("engine", "weights") in sync
    assert ("engine", "KV cache") not in sync
    kept = replace(s, offload_train=False)
    assert ("trainer", "optimizer") in phase(devices(kept)[0], "rollout")
    (node,) = hosts(s, exports=False, saves=False)
    assert ("trainer", "offloaded state (pinned)") in phase(node, "peak")


def test_the_kv_cache_is_what_the_weights_leave(tmp_path: Path) -> None:
    s = settings(tmp_path, "llama3-8b")
    cache = engine.cache(s)
    weights = 2 * s.model.parameters
    assert cache.num_bytes == int(0.92 * s.machine.device_bytes) - weights - engine.workspace(s) - engine.graphs(s) - GIB
    assert s.cache_bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert cache.tokens == int(cache.num_bytes / s.cache_bytes_per_token) // 16 * 16
    assert cache.longest_sequences == cache.tokens // 8192
    assert replace(s, engine_gpus=16).cache_bytes_per_token == 32 * 2 * 128 * 2, "8 groups are split over 8 GPUs at most"
    given = settings(tmp_path, "llama3-8b", vllm_tokens=("--kv-cache-memory-bytes", "10g", "--kv-cache-dtype=fp8"))
    assert engine.cache(given).num_bytes == 10 * 1000**3
    assert given.cache_bytes == 1
    assert replace(settings(tmp_path, "deepseek-lite"), engine_gpus=4).cache_bytes_per_token == 3 * (16 + 8) * 2, "not split"


def test_delta_nets_keep_a_state_a_sequence_and_no_cache(tmp_path: Path) -> None:
    s = settings(tmp_path, "qwen3-next-80b", debug_rollout_only=True, rollout_num_gpus=4, rollout_num_gpus_per_engine=4)
    assert s.cache_bytes_per_token == 12 * 2 * 2 * 256 * 2 / 2, "every fourth layer; 2 groups over 4 GPUs"
    assert s.state_bytes_per_sequence == 36 * (32 * 128 * 128 + 3 * 8192) * 4 / 4
    cache = engine.cache(s)
    assert cache.longest_sequences == int(cache.num_bytes / (8192 * s.cache_bytes_per_token + s.state_bytes_per_sequence))
    assert refusals(s) == []


def test_what_fits_is_not_refused(tmp_path: Path) -> None:
    plan = make_plan(settings(tmp_path, "qwen3-0.6b"))
    assert plan.refusals == []
    assert plan.batches.samples == 256
    assert plan.batches.total_steps == 10
    assert plan.sync is not None
    assert plan.sync.num_bytes == 2 * plan.settings.model.parameters
    assert plan.sync.seconds == pytest.approx(0.1 + plan.sync.num_bytes / 20e9)


def test_what_does_not_fit_is_named_with_gpu_excess_and_largest_item(tmp_path: Path) -> None:
    (problem,) = refusals(settings(tmp_path, "llama3-8b"))
    assert problem.startswith("GPU 0 (trainer): needs ")
    assert "in the train phase and has 139.8 GiB" in problem
    assert "too little. Largest item: trainer optimizer, 89.7 GiB." in problem


SMALL = PlanOptions(gpu="A100-40")
CASES: dict[str, tuple[str, dict[str, int], dict[str, object], PlanOptions]] = {
    "activations": ("qwen3-4b", {}, {"actor_num_gpus_per_node": 8}, PlanOptions(device_memory=64)),
    "optimizer": ("llama3-8b", {}, {"actor_num_gpus_per_node": 8, "rollout_num_gpus": 8}, PlanOptions(gpu="H100")),
    "experts": ("qwen3-30b-a3b", {}, {"actor_num_gpus_per_node": 8, "rollout_num_gpus": 8}, PlanOptions()),
    "engine weights": ("qwen2.5-7b", {}, {"actor_num_gpus_per_node": 8, "rollout_num_gpus": 8}, PlanOptions(gpu="A10")),
    "colocated": ("qwen3-4b", {}, {"colocate": True, "offload_train": False, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 8}, SMALL),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_offers_fit_and_say_how(tmp_path: Path, case: str) -> None:
    name, megatron, changes, options = CASES[case]
    s = settings(tmp_path, name, megatron, options=options, **changes)
    assert refusals(s), "the case is to be one that does not fit"
    found = offers(s)
    assert 1 <= len(found) <= 3
    for offer in found:
        assert refusals(offer.settings) == []
        assert all(flag.startswith("--") for flag in offer.flags)
    assert len({len(offer.flags) for offer in found}) == 1, "all change as little as possible"
    assert offers(s) == found, "the same question has the same answer"


def test_one_change_is_offered_where_one_is_enough(tmp_path: Path) -> None:
    s = settings(tmp_path, "qwen3-4b", actor_num_gpus_per_node=8, options=PlanOptions(device_memory=64))
    assert [len(offer.flags) for offer in offers(s)] == [1, 1, 1]
    assert any("--recompute-granularity full" in offer.flags[0] for offer in offers(s))


def test_flags_that_are_not_built_are_not_offered_to_a_run_that_could_start(tmp_path: Path) -> None:
    s = settings(tmp_path, "qwen3-4b", actor_num_gpus_per_node=8, options=PlanOptions(device_memory=64))
    without = {"--recompute-granularity", "--max-tokens-per-gpu"}
    found = offers(s, without=without)
    assert found
    assert not any(word in without for offer in found for flag in offer.flags for word in flag.split())


def test_nothing_is_offered_where_nothing_near_fits(tmp_path: Path) -> None:
    s = settings(tmp_path, "deepseek-v3", options=PlanOptions(gpu="L4"))
    assert refusals(s)
    assert offers(s) == []


def test_an_engine_that_cannot_hold_its_weights_or_one_sample_is_refused(tmp_path: Path) -> None:
    heavy = settings(tmp_path, "qwen3-30b-a3b", debug_rollout_only=True, options=PlanOptions(gpu="A100-40"))
    (problem,) = refusals(heavy)
    assert problem.startswith("engine: --vllm-gpu-memory-utilization 0.92 of 39.4 GiB is 2")
    assert problem.endswith("too little for weights and workspace. Largest item: engine weights, 56.9 GiB.")
    narrow = settings(tmp_path, "llama3-8b", debug_rollout_only=True, vllm_tokens=("--kv-cache-memory-bytes", "500000000"))
    assert "fewer than the longest sample has (8192)" in refusals(narrow)[0]


def test_the_smallest_engine_that_holds_the_work_is_advised(tmp_path: Path) -> None:
    small = settings(tmp_path, "qwen3-0.6b", rollout_num_gpus=8)
    assert engine_advice(small).startswith("--rollout-num-gpus-per-engine 1 is right as it is")
    large = settings(tmp_path, "qwen3-30b-a3b", rollout_num_gpus=8, options=PlanOptions(gpu="A100-40"))
    assert "is better than 1" in engine_advice(large)


@pytest.mark.parametrize(("megatron", "changes", "problem"), [
    ({"tensor_model_parallel_size": 3}, {"actor_num_gpus_per_node": 3}, "size 3 does not divide num_attention_heads (32)."),
    ({"pipeline_model_parallel_size": 5}, {"actor_num_gpus_per_node": 5}, "(36) into stages [7, 7, 7, 7, 7]."),
    ({"expert_model_parallel_size": 2}, {"actor_num_gpus_per_node": 2}, "Qwen3ForCausalLM has no experts."),
    ({"context_parallel_size": 4}, {"actor_num_gpus_per_node": 2}, "parallelism of 4 does not divide the trainer's processes (2)."),
    ({}, {"actor_num_gpus_per_node": 16}, "a node has 8 GPUs"),
    ({}, {"rollout_num_gpus_per_engine": 3, "rollout_num_gpus": 3}, "--rollout-num-gpus-per-engine 3 does not divide"),
])  # fmt: skip
def test_sizes_that_do_not_divide_are_refused(tmp_path: Path, megatron: dict[str, int], changes: dict[str, int], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, "qwen3-4b", megatron, **changes)
    assert problem in str(caught.value)


def test_on_a_cpu_all_processes_share_one_memory(tmp_path: Path) -> None:
    two = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2, "rollout_max_response_len": 1024}
    s = settings(tmp_path, "qwen3-0.6b", device="cpu", options=PlanOptions(host_memory=8), **two)
    (machine,) = devices(s)
    held = phase(machine, "train")
    padded = s.model.parameters + (s.padded_vocab - s.model.vocab) * s.model.hidden
    assert held["trainer", "weights"] == 2 * 4 * padded
    assert held["engine", "KV cache"] == 2 * GIB
    assert refusals(s)[0].startswith("this machine (all processes): needs ")
    assert all(refusals(offer.settings) == [] for offer in offers(s))
    assert hosts(s, exports=True, saves=True) == []
    behind = phase(devices(settings(tmp_path, "qwen3-0.6b", device="cpu", async_save=True, **two))[0], "train")
    assert behind["trainer", "checkpoint being written"] == held["trainer", "weights"] + held["trainer", "optimizer"]
    assert ("trainer", "checkpoint being written") not in held


def test_reference_and_teacher_wait_in_host_memory(tmp_path: Path) -> None:
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "opd_teacher_load": "teacher"}
    s = settings(tmp_path, "qwen3-4b", actor_num_gpus_per_node=4, **kl)
    without = settings(tmp_path, "qwen3-4b", actor_num_gpus_per_node=4)
    assert devices(s)[0].peak == devices(without)[0].peak
    (node, *_) = hosts(s, exports=False, saves=False)
    weights = trainer.stage_weights(s, 0).all * 2
    assert phase(node, "peak")["trainer", "weights of other roles (pinned)"] == 4 * 2 * weights
    on_cpu = settings(tmp_path, "qwen3-4b", device="cpu", **kl)
    assert phase(devices(on_cpu)[0], "rollout")["trainer", "weights of other roles"] == 2 * 2 * weights, "float32"


def test_ppos_critic_is_a_second_trainer_that_takes_turns(tmp_path: Path) -> None:
    s = settings(tmp_path, "llama3-8b", actor_num_gpus_per_node=8, advantage_estimator="ppo", colocate=True, rollout_num_gpus=8)
    train, rollout, sync = (phase(devices(s)[0], name) for name in ("train", "rollout", "sync"))
    output = 128256 * 4096
    assert train["critic", "weights"] == train["trainer", "weights"] - 2 * output, "one number a token in place of the logits"
    assert ("critic", "activations") not in train
    assert ("critic", "optimizer") not in rollout
    assert ("critic", "weights") not in sync
    assert sum(process.role == "critic" for process in processes(s)) == 8
    (machine,) = devices(settings(tmp_path, "llama3-8b", device="cpu", advantage_estimator="ppo"))
    assert {("critic", "activations"), ("critic", "optimizer")} <= set(phase(machine, "train"))


def test_batches_of_fixed_micro_batches_and_of_several_steps(tmp_path: Path) -> None:
    s: Settings = settings(
        tmp_path, "qwen3-0.6b", actor_num_gpus_per_node=4, use_dynamic_batch_size=False, max_tokens_per_gpu=None, micro_batch_size=2,
        global_batch_size=64,
    )  # fmt: skip
    b = make_plan(s).batches
    assert b.imbalance == 0
    assert make_plan(replace(s, steps=1, prompts=1, samples=10)).batches.imbalance == pytest.approx(0.2), "3 of 10 / 4 = 2.5"
    assert (b.steps, b.samples_per_step, b.samples_per_rank, b.micro_batches, b.total_steps) == (4, 64, (16, 16), 8, 40)
