"""Memory of a trainer rank: shares by layout, the terms of the activation formula, recompute, figures measured on an H200."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.plan.configs import settings
from vime.plan.footprint import total
from vime.plan.settings import Settings
from vime.plan.trainer import activation_numbers, held, in_flight, logits_items, stage_layers, stage_weights, train_items

GIB = 2**30


def sizes(s: Settings, stage: int = 0) -> dict[str, int]:
    return {item.name: item.num_bytes for item in [*held(s, stage), *train_items(s, stage)]}


def test_mixed_precision_takes_18_bytes_a_parameter_on_one_gpu(tmp_path: Path) -> None:
    s = settings(tmp_path, "qwen3-4b")
    padded = s.model.parameters + (s.padded_vocab - s.model.vocab) * s.model.hidden
    assert total(held(s, 0)) == 18 * padded, "2 weights, 4 gradients, 12 master copy and moments"


def test_stateless_adam_has_its_moments_while_it_trains_alone(tmp_path: Path) -> None:
    s = settings(tmp_path, "qwen3-4b")
    stateless = replace(s, stateless_adam=True)
    padded = s.model.parameters + (s.padded_vocab - s.model.vocab) * s.model.hidden
    assert total(held(stateless, 0)) == 10 * padded
    assert sizes(stateless)["moments of this step"] == 8 * padded


def test_kept_old_policies_wait_in_host_memory_as_many_as_data_may_be_behind(tmp_path: Path) -> None:
    counts = [settings(tmp_path, "qwen3-4b", keep_old_actor=True, max_weight_staleness=k).roles for k in (1, 3)]
    assert counts == [2, 4]
    assert settings(tmp_path, "qwen3-4b", max_weight_staleness=3).roles == 0


def test_float32_on_a_cpu_takes_16(tmp_path: Path) -> None:
    s = settings(tmp_path, "qwen3-moe-mixed", device="cpu")
    padded = s.model.parameters + (s.padded_vocab - s.model.vocab) * s.model.hidden
    assert total(held(s, 0)) == 16 * padded


@pytest.mark.parametrize(("name", "world", "megatron"), [
    ("qwen3-4b", 8, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    ("llama3-8b", 8, {"tensor_model_parallel_size": 8}),
    ("llama3-8b", 4, {"pipeline_model_parallel_size": 4}),
    ("qwen3-30b-a3b", 8, {"expert_model_parallel_size": 8}),
    ("qwen3-30b-a3b", 8, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}),
])  # fmt: skip
def test_the_ranks_hold_the_whole_model_together(tmp_path: Path, name: str, world: int, megatron: dict[str, int]) -> None:
    s = settings(tmp_path, name, megatron, actor_num_gpus_per_node=world)
    model, dense, experts = s.model, 0, 0
    for stage in range(s.pipeline):
        weights = stage_weights(s, stage)
        dense += weights.dense * s.tensor
        experts += weights.expert * s.expert * s.expert_tensor
    whole = sum(model.layer(i).whole for i in range(model.layers)) + model.hidden  # these stand on each tensor-parallel rank
    tables = (s.padded_vocab - model.vocab) * model.hidden * (1 if model.tied else 2)
    twice = s.padded_vocab * model.hidden if model.tied and s.pipeline > 1 else 0
    assert dense + experts == model.parameters + tables + twice + whole * (s.tensor - 1)


def test_the_optimizer_is_shared_by_the_ranks_that_hold_the_same_weights(tmp_path: Path) -> None:
    one, eight = (sizes(settings(tmp_path, "qwen3-4b", actor_num_gpus_per_node=n)) for n in (1, 8))
    assert eight["optimizer"] == pytest.approx(one["optimizer"] / 8, rel=1e-6)
    assert eight["weights"] == one["weights"]
    whole, split = (settings(tmp_path, "qwen3-30b-a3b", {"expert_model_parallel_size": n}, actor_num_gpus_per_node=8) for n in (1, 8))
    assert sizes(split)["optimizer"] == pytest.approx(sizes(whole)["optimizer"], rel=0.01), "fewer experts, fewer ranks to share them"
    assert sizes(split)["weights"] < sizes(whole)["weights"] / 5


def test_activations_of_a_dense_layer_are_the_tensors_that_its_backward_needs(tmp_path: Path) -> None:
    s = settings(tmp_path, "qwen3-0.6b")
    h, q, kv, f, heads = 1024, 2048, 1024, 3072, 16
    assert activation_numbers(s, 0) == 4 * h + (q + kv) + (q + 2 * kv) + (q + heads * 4 / 2) + 3 * f
    assert activation_numbers(replace(s, model=replace(s.model, qk_norm=False)), 0) == activation_numbers(s, 0) - (q + kv)


def test_tensor_parallelism_divides_the_norms_only_with_sequence_parallelism(tmp_path: Path) -> None:
    s = replace(settings(tmp_path, "qwen3-0.6b", actor_num_gpus_per_node=4), tensor=4)
    one = activation_numbers(replace(s, tensor=1), 0)
    assert activation_numbers(replace(s, sequence=True), 0) == one / 4
    assert activation_numbers(s, 0) == (one - 4 * 1024) / 4 + 4 * 1024


def test_on_a_cpu_a_groups_prompt_is_computed_once(tmp_path: Path) -> None:
    s = settings(tmp_path, "qwen3-4b", device="cpu", n_samples_per_prompt=8)
    share = (1024 / 8 + 7168) / 8192
    alone = sizes(replace(s, samples=1, prompts=256))["activations"]
    assert sizes(s)["activations"] == pytest.approx(alone * share, rel=1e-4)
    assert sizes(replace(s, sequence=True, tensor=2, trainers_per_node=2))["activations"] * 2 > alone * 0.99, (
        "not with sequence parallelism"
    )


def test_recompute_trades_activations_for_the_layers_inputs(tmp_path: Path) -> None:
    s = settings(tmp_path, "qwen3-4b")
    none, full = sizes(s)["activations"], sizes(replace(s, recompute="full"))
    assert full["activations"] == 36 * 2560 * 2 * 16384, "one input a layer (arXiv:2205.05198, section 5)"
    assert full["recomputed layer"] == pytest.approx(none / 36, rel=1e-6)
    coarse = sizes(replace(s, recompute="full", recompute_layers=12))
    assert coarse["activations"] == full["activations"] / 12
    assert coarse["recomputed layer"] == pytest.approx(none / 3, rel=1e-6)
    half = sizes(replace(s, recompute="full", recompute_method="block", recompute_layers=18))
    assert half["activations"] == pytest.approx(none / 2 + full["activations"] / 2, rel=1e-6)
    light = sizes(replace(s, recompute="selective", recompute_modules=("layernorm", "mlp")))["activations"]
    assert light == pytest.approx(none - 36 * (2 * 2560 + 3 * 9728) * 2 * 16384, rel=1e-6)


def test_pipeline_stages_hold_as_many_micro_batches_as_follow_them(tmp_path: Path) -> None:
    s = settings(tmp_path, "llama3-8b", {"pipeline_model_parallel_size": 4}, actor_num_gpus_per_node=4)
    assert [in_flight(s, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(replace(s, prompts=1, samples=2), 0) == 1, "never more than there are"
    twice = replace(s, virtual=2)
    p, v = 4, 2
    assert in_flight(twice, 0) == p * (1 + (p - 1) / (p * v)), "arXiv:2205.05198, eq. 5"


def test_layers_go_to_stages_as_megatron_deals_them(tmp_path: Path) -> None:
    s = settings(tmp_path, "qwen3-0.6b", {"pipeline_model_parallel_size": 2}, actor_num_gpus_per_node=2)
    assert [stage_layers(s, stage) for stage in (0, 1)] == [list(range(14)), list(range(14, 28))]
    assert stage_layers(replace(s, virtual=2), 0) == [*range(7), *range(14, 21)]
    four = {"pipeline_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 5, "decoder_last_pipeline_num_layers": 3}
    uneven = settings(tmp_path, "qwen3-0.6b", four, actor_num_gpus_per_node=4)
    assert [len(stage_layers(uneven, stage)) for stage in range(4)] == [5, 10, 10, 3]
    assert stage_layers(uneven, 3) == [25, 26, 27]


def test_logits_are_split_over_the_vocabulary_and_counted_for_scored_rows(tmp_path: Path) -> None:
    s = settings(tmp_path, "qwen3-4b")
    logits = {item.name: item.num_bytes for item in logits_items(s, 16384)}["logits and their gradient"]
    rows = int(16384 * 7168 / 8192)
    assert logits == 2 * rows * s.padded_vocab * 2
    split = {item.name: item.num_bytes for item in logits_items(replace(s, tensor=4), 16384)}["logits and their gradient"]
    assert split == pytest.approx(logits / 4, rel=1e-2)
    whole = {item.name: item.num_bytes for item in logits_items(replace(s, whole_logits=True), 16384)}
    assert whole["logits and their gradient"] == 2 * 16384 * s.padded_vocab * 2


@pytest.mark.parametrize(("name", "tokens", "measured_gib"), [("qwen3-0.6b", 4 * 4096, 36), ("qwen3-4b", 2 * 4096, 47)])
def test_forward_and_backward_take_what_was_measured_on_an_h200(tmp_path: Path, name: str, tokens: int, measured_gib: float) -> None:
    """megatron-core 0.19.2, local spec with SDPA, bfloat16, forward and backward of one micro-batch on one H200.

    There was neither optimizer nor gradient buffer: the peak is where the backward pass begins, with all activations, the logits
    of all positions in bfloat16 and, in Megatron's cross entropy, once in float32.
    """
    s = replace(settings(tmp_path, name), whole_logits=True, max_tokens=tokens, longest=4096)
    kept = sizes(s)["activations"] + sizes(s)["backward workspace"]
    predicted = kept + 2 * s.model.parameters + tokens * s.padded_vocab * (2 + 4)
    assert predicted / GIB == pytest.approx(measured_gib, rel=0.1)
