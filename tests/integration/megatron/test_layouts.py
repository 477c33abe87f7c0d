"""Tensor, sequence and data parallelism against one process; saving, resuming, resharding; faults; determinism."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

Results = Callable[..., dict[str, Any]]
Tensors = dict[str, torch.Tensor]


def worst(a: Tensors, b: Tensors) -> float:
    """max over parameters of max|a - b| / max|b|."""
    assert set(a) == set(b)
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in b)


def bitwise(a: Tensors, b: Tensors) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in b)


def losses(result: dict[str, Any]) -> list[float]:
    return [m["train/loss"] for m in result["metrics"]]


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


DENSE = [(family, layout) for family in ("qwen3", "qwen2", "llama", "qwen3_5") for layout in ("tp2", "sp2")]
OTHERS = [(family, layout) for family in ("qwen3_moe", "deepseek_v3", "qwen3_next") for layout in ("sp2", "pp2", "ep2")]


@pytest.mark.parametrize(("family", "layout"), [*DENSE, *OTHERS])
def test_a_family_over_two_ranks_equals_one_process(results: Results, family: str, layout: str) -> None:
    one, two = results(f"{family}_1"), results(f"{family}_{layout}")
    assert losses(two) == pytest.approx(losses(one), abs=1e-6)
    rounding = 1e-4 if family in ("qwen3_5", "qwen3_next") else 1e-5  # a delta net divides by the length of its keys: 3.4e-5 are reached
    assert worst(two["gradients"], one["gradients"]) <= rounding
    assert two["probe"] == pytest.approx(one["probe"], abs=1e-5)


@pytest.mark.parametrize("layout", ["sp2", "ep2"])
def test_multi_token_prediction_over_two_ranks_equals_one_process(results: Results, layout: str) -> None:
    one, two = results("deepseek_v3_mtp_1"), results(f"deepseek_v3_mtp_{layout}")
    assert two["metrics"][0]["train/mtp_loss"] == pytest.approx(one["metrics"][0]["train/mtp_loss"], abs=1e-5)
    assert worst(two["gradients"], one["gradients"]) <= 1e-5
    assert "model.layers.2.eh_proj.weight" in one["gradients"]


def test_data_parallel_two_equals_one_process(results: Results) -> None:
    one, two = results("qwen3_1"), results("dp2")
    assert losses(two) == pytest.approx(losses(one), abs=1e-6)
    assert worst(two["gradients"], one["gradients"]) <= 1e-5


def test_more_micro_batches_give_the_same_gradient(results: Results) -> None:
    assert worst(results("four_micro")["gradients"], results("qwen3_1")["gradients"]) <= 1e-5


def test_overlapped_communication_changes_nothing(results: Results) -> None:
    assert losses(results("dp2_overlap")) == losses(results("dp2_two"))
    assert bitwise(results("dp2_overlap")["weights"], results("dp2_two")["weights"])


def test_only_rank_0_gets_weights(results: Results) -> None:
    assert results("dp2", rank=1)["weights"] == {}
    assert results("qwen3_tp2", rank=1)["weights"] == {}


def test_all_ranks_report_the_same_metrics(results: Results) -> None:
    for case in ("dp2", "qwen3_tp2", "qwen3_sp2"):
        assert results(case, rank=0)["metrics"] == results(case, rank=1)["metrics"]
        assert results(case, rank=0)["probe"] == results(case, rank=1)["probe"]


def test_same_seed_and_layout_is_bitwise_the_same(results: Results) -> None:
    first, again = results("qwen3_1"), results("again")
    assert [without_times(m) for m in first["metrics"]] == [without_times(m) for m in again["metrics"]]
    assert bitwise(first["weights"], again["weights"])


@pytest.mark.parametrize("case", ["four_steps", "dp2_four"])
def test_a_state_saved_in_the_background_is_written_beside_training(results: Results, case: str) -> None:
    assert not [name for name in results(case)["early"] if name.endswith(".distcp") or name == "metadata.json"]


@pytest.mark.parametrize("case", ["two_steps", "dp2_two", "tp2_two"])
def test_a_save_that_failed_is_an_error_of_all_ranks_and_the_next_one_is_whole(results: Results, case: str) -> None:
    """Twice, since the garbage collector once ended the process at the second one; what is saved afterwards is resumed below."""
    first, second = results(case)["refused_save"]
    assert first.startswith("ResourceError: no space left on")
    assert "rank 0: [Errno 27] File too large" in first
    assert second == first
    if case != "two_steps":
        assert results(case, rank=1)["refused_save"] == [first, second]


@pytest.mark.parametrize("case", ["two_steps", "dp2_two", "tp2_two"])
def test_an_export_that_failed_is_an_error_of_all_ranks_and_costs_no_save(results: Results, case: str) -> None:
    said = results(case)["refused_export"]
    assert said.startswith("ResourceError: the Hugging Face folder")
    assert "File too large" in said
    if case != "two_steps":
        assert results(case, rank=1)["refused_export"] == said


RESUMED = [("four_steps", "two_more"), ("dp2_four", "dp2_more"), ("four_steps", "two_after"), ("dp2_four", "dp2_after")]


@pytest.mark.parametrize(("whole", "more"), RESUMED)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(results: Results, whole: str, more: str) -> None:
    expected, resumed = results(whole), results(more)
    assert [without_times(m) for m in resumed["metrics"]] == [without_times(m) for m in expected["metrics"][2:]]
    assert bitwise(resumed["weights"], expected["weights"])
    assert resumed["step"] == 4


@pytest.mark.parametrize("case", ["dp2_from_tp2", "tp2_from_dp2"])
def test_a_saved_state_resumes_at_another_layout(results: Results, case: str) -> None:
    expected, resumed = results("four_steps"), results(case)
    assert losses(resumed) == pytest.approx(losses(expected)[2:], abs=2e-3)
    assert resumed["step"] == 4


def test_a_converted_checkpoint_loads_at_tensor_parallel_two(results: Results, run_folder: Path) -> None:
    from safetensors.torch import load_file

    result = results("tp2_converted")
    assert bitwise(result["weights"], load_file(run_folder / "moved" / "model.safetensors"))
    assert result["step"] == 0


def test_a_state_saved_by_two_ranks_is_converted_by_one_process(results: Results, run_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from vime.backends.megatron_utils.convert.checkpoint import megatron_to_hf

    saved = run_folder / "save_tp2"
    megatron_to_hf(saved, tmp_path / "hf", hf_folder=saved / "hf", shard_bytes=10**9)
    assert bitwise(load_file(tmp_path / "hf" / "model.safetensors"), results("tp2_two")["weights"])


def test_another_runs_state_gives_weights_and_moments_and_begins_anew(results: Results) -> None:
    """At the rate that the resumed run has by then, its step from loaded weights, moments and Adam's count is the same."""
    anew, resumed = results("anew"), results("one_more")
    assert anew["metrics"][0]["train/lr-pg_0"] == 8e-4
    assert anew["metrics"][0]["train/step"] == 1
    assert anew["step"] == 1
    assert resumed["metrics"][0]["train/step"] == 3
    assert anew["probe"] == resumed["probe"]
    assert worst(anew["weights"], resumed["weights"]) <= 1e-6


@pytest.mark.parametrize(
    ("case", "folder", "said"),
    [
        ("torn", "torn", "cannot be loaded"),
        ("foreign", "save_1", "It is torn, or of a model of another shape."),
        ("missing", "nowhere", "is no complete trainer state: metadata.json, which is written last, is missing"),
    ],
)
def test_a_torn_a_foreign_and_a_missing_state_are_errors_that_name_the_folder(
    results: Results, run_folder: Path, case: str, folder: str, said: str
) -> None:
    error = results(case)["error"]
    assert error.startswith(f"CheckpointError: {run_folder / folder} ")
    assert said in error
    assert "Traceback" not in error


def test_another_runs_weights_alone_are_those_of_its_export(results: Results) -> None:
    alone, export, anew = results("weights_alone"), results("from_export"), results("anew")
    assert alone["probe"] == anew["probe"]
    assert alone["step"] == 1
    assert bitwise(alone["weights"], export["weights"])  # no moments: the same first step as from the exported folder
    assert not bitwise(alone["weights"], anew["weights"])


@pytest.mark.parametrize(("case", "rate"), [("one_more", 8e-4), ("longer", 9e-4), ("higher", 1.6e-3), ("saved_schedule", 8e-4)])
def test_a_resumed_schedule_keeps_its_position_and_follows_the_command_line(results: Results, case: str, rate: float) -> None:
    (metrics,) = results(case)["metrics"]
    assert metrics["train/lr-pg_0"] == pytest.approx(rate, rel=1e-9)
    assert metrics["train/step"] == 3


def test_a_state_loads_for_evaluation_alone(results: Results) -> None:
    result = results("evaluates")
    assert result["step"] == 2
    assert result["probe"] == results("one_more")["probe"]


def test_a_full_disk_is_an_error_that_says_so(results: Results, run_folder: Path) -> None:
    if not (run_folder / "disk_full.0.pt").exists():
        pytest.skip("no right to mount a small disk here; tests/unit/backends/megatron_utils/test_checkpoint.py has the decision")
    error = results("disk_full")["error"]
    assert error.startswith(f"ResourceError: no space left on {run_folder / 'full' / 'state'} for the trainer's state")
    assert "earlier commits are intact" in error


def test_saving_leaves_no_process_behind(results: Results) -> None:
    assert results("two_steps")["children"] == []


def test_a_loss_that_is_not_finite_names_the_sample_and_keeps_the_weights(results: Results) -> None:
    for case in ("nan", "dp2_nan"):
        result = results(case)
        assert result["error"].startswith("TrainerError: loss nan")
        assert "step 0 of rollout 0" in result["error"]
        assert "105" in result["error"]
        assert result["metrics"] == []
    assert results("dp2_nan", rank=1)["error"] == results("dp2_nan")["error"]


def test_the_death_of_a_rank_is_an_error_of_the_others(results: Results) -> None:
    error = results("dp2_death")["error"]
    assert error.startswith(
        "TrainerError: trainer rank 0 lost another rank during 'train on rollout 0' (last progress: 0 optimizer steps done)"
    )


def test_weights_after_a_refused_step_are_those_of_the_folder(results: Results, models: dict[str, str]) -> None:
    from safetensors.torch import load_file

    assert bitwise(results("nan")["weights"], load_file(Path(models["qwen3"]) / "model.safetensors"))


def test_old_log_probs_are_those_of_the_weights_that_generated(results: Results) -> None:
    (metrics,) = results("several_steps")["metrics"]
    assert metrics["train/num_steps"] == 3
    assert metrics["train/step"] == 3
    assert metrics["train/ppo_kl"] != 0.0  # the later steps' policy has moved away from the old one


def test_the_kl_to_a_reference_of_the_same_weights_starts_at_zero(results: Results) -> None:
    first, second = results("kl")["metrics"]
    assert first["train/kl_loss"] == pytest.approx(0.0, abs=1e-7)
    assert second["train/kl_loss"] > 1e-6
    assert first["train/entropy_loss"] > 0.0


def test_sharing_prompts_and_leaving_out_what_nothing_looks_at_changes_nothing(results: Results) -> None:
    """A user's loss gets the logits of all positions, so there everything is computed; so is it with sequence parallelism."""
    own, ours = results("own_loss"), results("qwen3_1")
    assert own["metrics"][0]["train/own"] == pytest.approx(ours["metrics"][0]["train/pg_loss"], abs=1e-6)
    assert worst(own["gradients"], ours["gradients"]) <= 1e-5


def test_recomputing_activations_changes_nothing(results: Results) -> None:
    assert losses(results("recompute")) == losses(results("qwen3_1"))
    assert bitwise(results("recompute")["gradients"], results("qwen3_1")["gradients"])


def test_supervised_loss_is_the_negative_log_likelihood(results: Results) -> None:
    metrics = results("sft")["metrics"]
    assert all(m["train/loss"] > 0 and m["train/grad_norm"] > 0 for m in metrics)
    assert results("sft_hot")["metrics"][0]["train/loss"] == metrics[0]["train/loss"]  # whatever --rollout-temperature is


def test_the_exported_folder_is_loaded_by_transformers(results: Results, run_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(run_folder / "hf_1")
    assert bitwise({k: v for k, v in exported.state_dict().items() if k != "lm_head.weight"}, results("two_steps")["weights"])


def test_log_probs_equal_transformers(results: Results, models: dict[str, str]) -> None:
    from transformers import AutoModelForCausalLM

    tokens = list(range(3, 25))
    for family, path in models.items():
        if family.endswith("_mtp"):  # layers of which transformers knows nothing
            continue
        logits = AutoModelForCausalLM.from_pretrained(path)(torch.tensor([tokens])).logits[0, :-1]
        expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert results(f"{family}_1")["probe"] == pytest.approx(expected.tolist(), abs=1e-5)
