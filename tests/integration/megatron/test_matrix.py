"""Every parallel layout gives the losses, log-probs and gradients of one process: dense models and mixtures of experts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.megatron.conftest import RECOMPUTE, run_all
from tests.integration.megatron.lora_cases import LORA_LAYOUTS, lora_cases
from tests.tiny_models import write_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

Results = Callable[..., dict[str, Any]]
Tensors = dict[str, torch.Tensor]

SIZES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "chunk": "--num-layers-per-virtual-pipeline-stage",
    "first": "--decoder-first-pipeline-num-layers",
}
MODELS = ("deep", "deep_untied", "qwen3_moe", "deepseek_v3")
ADAPTED = (*MODELS, "qwen3_next")
LAYOUTS = {  # processes -> model -> layouts; "sp" is tensor and sequence parallelism
    2: {
        "deep": ["pp2", "pp2 chunk1", "cp2", "pp2 first1"],
        "deep_untied": ["pp2", "cp2"],
        "deepseek_v3": ["cp2 ep2"],
        "qwen3_moe": ["dp2", "ep2", "sp2", "pp2", "cp2", "cp2 ep2", "sp2 ep2 etp1"],
    },
    4: {
        "deep": ["pp4", "tp2 pp2", "cp2 dp2", "sp2 pp2 chunk1", "sp2 cp2"],
        "deep_untied": ["pp2 cp2", "cp4", "sp2 pp2"],
        "qwen3_moe": ["pp2 ep2", "sp2 ep2", "sp2 pp2 ep2 etp1"],
    },
}
BALANCE = ["--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.1", "--moe-z-loss-coeff", "0.05"]
BIAS = ["--moe-router-bias-update-rate", "0.01"]
SELECTIVE = ["--recompute-granularity", "selective"]
EQUAL = 1e-5  # of gradients, relative to the largest of each parameter; of log-probs, absolute


def tokens_of(layout: str) -> list[str]:
    """Megatron's flags of a layout."""
    out: list[str] = []
    for part in layout.split():
        name, size = part.rstrip("0123456789"), part.lstrip("abcdefghijklmnopqrstuvwxyz")
        if name == "dp":
            continue  # what is left of the processes
        out += [SIZES["tp" if name == "sp" else name], size, *(["--sequence-parallel"] if name == "sp" else [])]
    return out


def cases_of(models: dict[str, str], folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The cases by number of processes, those first that others start from."""
    deep, moe = models["deep"], models["qwen3_moe"]
    grads: dict[str, Any] = {"gradients": True}
    saved, saved_moe = str(folder / "save"), str(folder / "save_moe")
    replay = {"model": moe, "steps": 3, "algorithm": {"use_routing_replay": True}}
    routed = {**replay, "algorithm": {"use_rollout_routing_replay": True}, "engine_routing": True}
    frozen = {"model": deep, "training": {"freeze_params_name_list": ["embedding", r"layers\.1\.mlp"]}, **grads}
    cases = {
        size: [
            {"name": f"{model} {layout}", "model": models[model], "tokens": tokens_of(layout), **grads}
            for model, layouts in of_models.items()
            for layout in layouts
        ]
        for size, of_models in LAYOUTS.items()
    }
    cases[1] = [{"name": f"{model} one", "model": models[model], **grads} for model in MODELS]
    cases[4] += [
        {"name": "two steps", "model": deep, "tokens": tokens_of("sp2 pp2 chunk1"), "count": 2, "save": saved},
        {"name": "two steps moe", "model": moe, "tokens": tokens_of("sp2 pp2 ep2 etp1"), "count": 2, "save": saved_moe},
    ]
    cases[2] += [
        {"name": "two more cp2", "model": deep, "tokens": tokens_of("cp2"), "first": 2, "count": 2, "load": saved},
        {"name": "two more ep2", "model": moe, "tokens": tokens_of("ep2"), "first": 2, "count": 2, "load": saved_moe},
        {"name": "balanced cp2", "model": moe, "tokens": tokens_of("cp2") + BALANCE, **grads},
        {"name": "balanced dp2", "model": moe, "tokens": BALANCE, **grads},
        {"name": "uneven dp2", "model": models["deepseek_v3"], "tokens": BALANCE + BIAS, "uneven": True, **grads},
        {"name": "engine routed pp2", **routed, "tokens": tokens_of("pp2") + RECOMPUTE},
        {"name": "engine routed cp2", **routed, "tokens": tokens_of("cp2")},
        {"name": "engine routed sp2", **routed, "tokens": tokens_of("sp2")},
        {"name": "replayed pp2", **replay, "tokens": tokens_of("pp2") + RECOMPUTE},
        {"name": "bf16 pp2", "model": deep, "tokens": [*tokens_of("pp2"), "--bf16"]},
        {"name": "frozen pp2", **frozen, "tokens": tokens_of("pp2") + RECOMPUTE},
        *({"name": f"recompute {layout}", "model": deep, "tokens": tokens_of(layout) + RECOMPUTE, **grads} for layout in ("pp2", "cp2")),
        {"name": "selective sp2", "model": deep, "tokens": tokens_of("sp2") + SELECTIVE, **grads},
        {"name": "deep sp2", "model": deep, "tokens": tokens_of("sp2"), **grads},
    ]
    cases[1] += [
        {"name": "four steps", "model": deep, "count": 4},
        {"name": "four steps moe", "model": moe, "count": 4},
        {"name": "balanced", "model": moe, "tokens": BALANCE, **grads},
        {"name": "uneven", "model": models["deepseek_v3"], "tokens": BALANCE + BIAS, "uneven": True, **grads},
        {"name": "balanced four", "model": moe, "tokens": BALANCE, "micro": 4, **grads},
        {"name": "replayed", **replay},
        {"name": "engine routed", **routed},
        {"name": "routed anew", **replay, "algorithm": {}},
        {"name": "frozen", **frozen},
        {"name": "bf16", "model": deep, "tokens": ["--bf16"]},
        {"name": "only", "model": deep, "training": {"only_train_params_name_list": ["linear_fc1"]}, **grads},
        {"name": "frozen nothing", "model": deep, "training": {"freeze_params_name_list": ["no such name"]}, "refused": True},
    ]
    adapted = lora_cases(models, folder, tokens_of)
    return {size: [*cases[size], *adapted[size]] for size in (4, 2, 1)}


@pytest.fixture(scope="session")
def matrix_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all cases left their results. One number of processes after the other."""
    folder = tmp_path_factory.mktemp("matrix")
    models = {name: str(write_model(name, folder / name)) for name in ADAPTED}
    models["deep_copy"] = str(shutil.copytree(models["deep"], folder / "deep_copy"))
    for size, listed in cases_of(models, folder).items():
        run_all(folder, {size: listed})
    return folder


@pytest.fixture(scope="session")
def matrix(matrix_folder: Path) -> Results:
    """matrix(case, rank=0): what a rank of a case stored."""

    def load(name: str, rank: int = 0) -> dict[str, Any]:
        return torch.load(matrix_folder / f"{name}.{rank}.pt", weights_only=False)

    return load


def worst(a: Tensors, b: Tensors) -> float:
    """max over parameters of max|a - b| / max|b|."""
    assert set(a) == set(b)
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max().clamp(min=1e-12)) for name in b)


def losses(result: dict[str, Any]) -> list[float]:
    return [m["train/loss"] for m in result["metrics"]]


@pytest.mark.parametrize(
    ("model", "layout"), [(model, layout) for of in LAYOUTS.values() for model, layouts in of.items() for layout in layouts]
)
def test_a_layout_equals_one_process(matrix: Results, model: str, layout: str) -> None:
    one, many = matrix(f"{model} one"), matrix(f"{model} {layout}")
    assert losses(many) == pytest.approx(losses(one), abs=1e-6)
    for name, value in one["metrics"][0].items():
        if not name.startswith("perf/"):
            assert many["metrics"][0][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    assert worst(many["gradients"], one["gradients"]) <= EQUAL
    assert many["probe"] == pytest.approx(one["probe"], abs=EQUAL)


def test_all_ranks_report_the_same(matrix: Results) -> None:
    first = matrix("deep sp2 pp2 chunk1")
    for rank in (1, 2, 3):
        other = matrix("deep sp2 pp2 chunk1", rank)
        assert other["metrics"] == first["metrics"]
        assert other["probe"] == first["probe"]
        assert other["weights"] == {}


@pytest.mark.parametrize(("whole", "more"), [("four steps", "two more cp2"), ("four steps moe", "two more ep2")])
def test_a_state_saved_in_one_layout_goes_on_in_another(matrix: Results, whole: str, more: str) -> None:
    assert losses(matrix(more)) == pytest.approx(losses(matrix(whole))[2:], abs=2e-3)
    assert matrix(more)["step"] == 4


@pytest.mark.parametrize(("case", "plain"), [("recompute pp2", "deep pp2"), ("recompute cp2", "deep cp2"), ("selective sp2", "deep sp2")])
def test_recomputing_activations_changes_nothing(matrix: Results, case: str, plain: str) -> None:
    assert losses(matrix(case)) == losses(matrix(plain))
    assert worst(matrix(case)["gradients"], matrix(plain)["gradients"]) <= 1e-7


@pytest.mark.parametrize(("case", "like"), [("balanced cp2", "balanced"), ("balanced dp2", "balanced four")])
def test_load_balancing_losses_are_those_of_one_process(matrix: Results, case: str, like: str) -> None:
    """With as many micro-batches in all: they are means over micro-batches."""
    one, many = matrix(like), matrix(case)
    assert worst(many["gradients"], one["gradients"]) <= EQUAL
    assert worst(one["gradients"], matrix("qwen3_moe one")["gradients"]) > 1e-3
    for name in ("train/moe_load_balancing_loss", "train/moe_z_loss"):
        assert many["metrics"][0][name] == pytest.approx(one["metrics"][0][name], rel=1e-5)
        assert one["metrics"][0][name] > 0.5


def test_a_filler_counts_neither_in_load_balancing_losses_nor_in_the_experts_biases(matrix: Results) -> None:
    """Three micro-batches in one process; over two, of which one then has a filler."""
    one, two = matrix("uneven"), matrix("uneven dp2")
    assert worst(two["gradients"], one["gradients"]) <= EQUAL
    for name in ("train/loss", "train/moe_load_balancing_loss", "train/moe_z_loss"):
        assert two["metrics"][0][name] == pytest.approx(one["metrics"][0][name], rel=1e-5, abs=1e-7)
    biases = [name for name in one["weights"] if name.endswith("e_score_correction_bias")]
    assert biases
    for name in biases:
        assert torch.equal(two["weights"][name], one["weights"][name])
        assert not torch.equal(one["weights"][name], matrix("deepseek_v3 one")["weights"][name])  # it moved by a tenth of that


def test_replayed_routing_keeps_the_experts_of_the_policy_that_generated(matrix: Results) -> None:
    replayed, anew, pipeline = matrix("replayed"), matrix("routed anew"), matrix("replayed pp2")
    assert losses(pipeline) == pytest.approx(losses(replayed), abs=1e-6)
    assert worst(pipeline["weights"], replayed["weights"]) <= 1e-5
    assert worst(replayed["weights"], anew["weights"]) > 1e-4  # the weights moved, and with them some of the routing


@pytest.mark.parametrize(("layout", "tolerance"), [("", 1e-6), (" pp2", 1e-6), (" cp2", 1e-4), (" sp2", 1e-4)])
def test_the_engines_routing_is_trained_with(matrix: Results, layout: str, tolerance: float) -> None:
    """transformers' routing under the start weights, as an engine tells it, is what the trainer would have recorded.

    Over three steps Adam makes 2e-5 of what context and tensor parallelism round differently; routing anew makes 5e-3.
    """
    recorded, told, anew = (losses(matrix(name)) for name in ("replayed", f"engine routed{layout}", "routed anew"))
    assert told == pytest.approx(recorded, abs=tolerance)
    assert anew != pytest.approx(recorded, abs=1e-3)


def test_bfloat16_keeps_weights_and_gradients_of_the_optimizer_in_float32(matrix: Results) -> None:
    for case in ("bf16", "bf16 pp2"):
        result = matrix(case)
        assert result["weights"]["model.norm.weight"].dtype == torch.bfloat16
        assert result["master"] == result["sums"] == {torch.float32}
        assert losses(result) == pytest.approx(losses(matrix("deep one")), abs=0.02)
        assert result["probe"] == pytest.approx(matrix("deep one")["probe"], abs=0.3)
    assert losses(matrix("bf16 pp2")) == pytest.approx(losses(matrix("bf16")), abs=1e-3)


def test_frozen_parameters_stay_and_the_others_learn_as_before(matrix: Results) -> None:
    whole = matrix("deep one")["gradients"]
    for case in ("frozen", "frozen pp2"):
        gradients = matrix(case)["gradients"]
        still = {name for name, value in gradients.items() if not value.any()}
        assert still == {"model.embed_tokens.weight", *(f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))}
        assert worst({n: v for n, v in gradients.items() if n not in still}, {n: v for n, v in whole.items() if n not in still}) <= EQUAL
    only = matrix("only")["gradients"]
    assert {name.rpartition("mlp.")[2] for name, value in only.items() if value.any()} == {"gate_proj.weight", "up_proj.weight"}


def test_an_expression_that_is_found_nowhere_is_refused(matrix: Results) -> None:
    error = matrix("frozen nothing")["error"]
    assert error.startswith("ConfigError: --freeze-params-name-list 'no such name' is found in no parameter's name. Names are like ")


@pytest.mark.parametrize(
    ("model", "layout"), [(model, layout) for of in LORA_LAYOUTS.values() for model, layouts in of.items() for layout in layouts]
)
def test_adapters_in_a_layout_equal_those_of_one_process(matrix: Results, model: str, layout: str) -> None:
    one, many = matrix(f"lora {model} one"), matrix(f"lora {model} {layout}")
    assert losses(many) == pytest.approx(losses(one), abs=1e-6)
    assert many["metrics"][0]["train/grad_norm"] == pytest.approx(one["metrics"][0]["train/grad_norm"], rel=1e-5)
    assert all(value.any() for name, value in one["gradients"].items() if ".experts." not in name), "of A and of B"
    rounding = 1e-4 if model == "qwen3_next" else EQUAL  # as for its own weights: a delta net divides by the length of its keys
    assert worst(many["gradients"], one["gradients"]) <= rounding
    assert worst(many["weights"], one["weights"]) <= 1e-4  # merged, after one step of Adam, which divides small gradients by themselves
    assert many["probe"] == pytest.approx(one["probe"], abs=EQUAL)


def test_adapters_on_some_of_a_fused_layers_parts(matrix: Results) -> None:
    one, many = matrix("lora few one"), matrix("lora few sp2")
    assert {name.split(".")[-3] for name, value in one["gradients"].items() if value.any()} == {"q_proj", "v_proj", "down_proj"}
    assert all(name.split(".")[-3] != "k_proj" for name in one["gradients"]), "the rows of k have no adapter"
    assert worst(many["gradients"], one["gradients"]) <= EQUAL
    base = matrix("lora merged")["weights"]
    for result in (one, many):
        moved = {name.split(".")[-2] for name, value in result["weights"].items() if not torch.equal(value, base[name])}
        assert moved == {"q_proj", "v_proj", "down_proj"}


def test_adapters_that_begin_change_nothing_to_the_bit(matrix: Results) -> None:
    start, plain = matrix("lora start"), matrix("lora merged")
    assert start["probe"] == plain["probe"]
    assert all(torch.equal(start["weights"][name], value) for name, value in plain["weights"].items())


def test_the_optimizer_holds_adapters_alone(matrix: Results) -> None:
    assert matrix("lora start")["trained"] == sum(tensor.numel() for tensor in matrix("lora deep one")["gradients"].values())


@pytest.mark.parametrize(("whole", "more"), [("four steps", "two more cp2"), ("four steps moe", "two more ep2")])
def test_adapters_saved_in_one_layout_go_on_in_another(matrix: Results, whole: str, more: str) -> None:
    whole_run, rest = matrix(f"lora {whole}"), matrix(f"lora {more}")
    assert rest["step"] == 4
    for name in ("train/loss", "train/grad_norm"):
        assert [m[name] for m in rest["metrics"]] == pytest.approx([m[name] for m in whole_run["metrics"][2:]], rel=2e-3, abs=1e-5)
    assert worst(rest["weights"], whole_run["weights"]) <= 2e-3


def test_adapters_that_cannot_be_written_are_an_error_of_all_ranks(matrix: Results) -> None:
    """Rank 0 alone writes their folder; nobody waits for it in vain, and the next save fails in the same way."""
    said = matrix("lora refused tp2")["refused_save"]
    assert said[0].startswith("ResourceError: the adapter folder")
    assert "File too large" in said[0]
    assert said == matrix("lora refused tp2", rank=1)["refused_save"] == [said[0]] * 2


def test_a_checkpoint_of_adapters_holds_no_base_model_and_says_whose_it_is(matrix: Results, matrix_folder: Path) -> None:
    keys = json.dumps([str(key) for key in torch.load(matrix_folder / "lora two steps.0.pt", weights_only=False)["saved_keys"]])
    assert "linear_qkv_adapter" in keys
    assert "linear_qkv.weight" not in keys
    assert "--lora-rank 5 is 4 there" in matrix("lora rank 5")["error"]
    assert "holds adapters of rank 4 and no model: give --lora-rank 4" in matrix("lora none")["error"]


def test_transformers_computes_the_same_with_the_exported_weights_and_with_the_exported_adapters(
    matrix: Results, matrix_folder: Path
) -> None:
    """The adapters by the formula of LoRA on transformers' own layers, and merged by us: neither knows of the other."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    exported = matrix_folder / "lora_hf"
    merged = AutoModelForCausalLM.from_pretrained(exported)
    adapted = AutoModelForCausalLM.from_pretrained(matrix_folder / "deep")
    config, factors = json.loads((exported / "adapter" / "adapter_config.json").read_text()), {}
    for name, tensor in load_file(exported / "adapter" / "adapter_model.safetensors").items():
        layer, letter = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".lora_", 1)
        factors[layer, letter] = tensor
    layers = {layer for layer, _ in factors}
    assert len(layers) == 4 * 7
    for layer in layers:
        scaled = config["lora_alpha"] / config["r"] * factors[layer, "B"]
        adapted.get_submodule(layer).register_forward_hook(
            lambda _, inputs, out, a=factors[layer, "A"], b=scaled: out + inputs[0] @ a.T @ b.T
        )
    tokens = torch.arange(3, 25)
    for model in (merged, adapted):
        with torch.no_grad():
            found = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        assert matrix("lora two steps")["probe_then"] == pytest.approx(found.tolist(), abs=1e-4)
    assert matrix("lora two steps")["probe_then"] != pytest.approx(matrix("lora merged")["probe"], abs=0.1)


def test_the_reference_is_the_model_without_its_adapters(matrix: Results) -> None:
    base, loaded = matrix("lora base kl")["metrics"], matrix("lora model kl")["metrics"]
    assert base[0]["train/kl_loss"] > 1e-3
    for name in ("train/kl_loss", "train/loss", "train/grad_norm"):
        assert base[0][name] == loaded[0][name]


def test_dropout_acts_in_training_and_repeats_with_the_seed(matrix: Results) -> None:
    dropped, again, whole = matrix("lora dropout"), matrix("lora dropout again"), matrix("lora deep one")
    assert worst(dropped["gradients"], again["gradients"]) == 0
    assert worst(dropped["gradients"], whole["gradients"]) > 0.1
    assert dropped["probe"] == whole["probe"], "log-probs are taken without it"


def test_bfloat16_adapters_have_float32_masters(matrix: Results) -> None:
    for case in ("lora bf16", "lora bf16 tp2"):
        result = matrix(case)
        assert result["weights"]["model.norm.weight"].dtype == torch.bfloat16
        assert result["master"] == {torch.float32}
        assert result["probe"] == pytest.approx(matrix("lora deep one")["probe"], abs=0.3)
