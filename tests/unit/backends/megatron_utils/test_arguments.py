"""Megatron's flags: parsed by its own parser, checked against the model folder and our flags, never ignored."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vime.backends.megatron_utils import arguments
from vime.backends.megatron_utils.bootstrap import Platform
from vime.backends.megatron_utils.convert.registry import model_ops, model_shape
from vime.backends.megatron_utils.flags import BOUNDS, HONOURED
from vime.config import sections as s
from vime.config.renamed import MEGATRON
from vime.config.run import RunConfig
from vime.errors import ConfigError

CPU = Platform(device=torch.device("cpu"), dtype=torch.float32, backend="gloo")
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 90, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
}  # fmt: skip


def folder_of(path: Path, **changes: Any) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(QWEN3 | changes))
    return str(path)


def resolved(folder: str, *tokens: str, world_size: int = 1, **training: Any) -> Any:
    config = replace(RunConfig(megatron_tokens=tokens), training=s.TrainingConfig(**training))
    return arguments.resolve(config, model_shape(folder), CPU, world_size=world_size)


def test_the_shape_comes_from_the_folder(tmp_path: Path) -> None:
    args = resolved(folder_of(tmp_path / "m"))
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size, args.kv_channels) == (3, 64, 96, 32)
    assert (args.num_attention_heads, args.num_query_groups, args.group_query_attention) == (4, 2, True)
    assert (args.layernorm_epsilon, args.rotary_base, args.qk_layernorm, args.add_qkv_bias) == (1e-5, 1000000, True, False)
    assert args.untie_embeddings_and_output_weights is False
    assert args.padded_vocab_size == 128


def test_vocabulary_padding_follows_the_flag(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m")
    assert resolved(folder, "--make-vocab-size-divisible-by", "8").padded_vocab_size == 96
    assert (
        resolved(folder, "--make-vocab-size-divisible-by", "3", "--tensor-model-parallel-size", "2", world_size=2).padded_vocab_size == 90
    )


def test_our_flags_and_the_platform_reach_megatron(tmp_path: Path) -> None:
    args = resolved(folder_of(tmp_path / "m"), "--weight-decay", "0.1", lr=0.25, clip_grad=0.5, seed=7)
    assert (args.lr, args.clip_grad, args.seed, args.weight_decay) == (0.25, 0.5, 7, 0.1)
    assert (args.bf16, args.params_dtype, args.use_distributed_optimizer) == (False, torch.float32, True)
    assert (args.hidden_dropout, args.attention_dropout) == (0.0, 0.0)


def test_slimes_model_flags_are_accepted_when_they_agree(tmp_path: Path) -> None:
    tokens = "--swiglu --num-layers 3 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    tokens += "--use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-5 --rotary-base 1000000 "
    tokens += "--qk-layernorm --kv-channels 32 --attention-dropout 0.0 --hidden-dropout 0.0 --attention-softmax-in-fp32 "
    tokens += "--accumulate-allreduce-grads-in-fp32 --attention-backend flash --context-parallel-size 1 --vocab-size 90"
    assert resolved(folder_of(tmp_path / "m"), *tokens.split()).num_layers == 3


def test_experts_are_those_of_the_folder(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    folder = folder_of(tmp_path / "m", architectures=["Qwen3MoeForCausalLM"], mlp_only_layers=[1], **experts)
    tokens = ["--num-experts", "4", "--moe-layer-freq", "[1,0,1]", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "24"]
    args = resolved(folder, *tokens)
    assert (args.num_experts, args.moe_layer_freq, args.moe_router_pre_softmax) == (4, [1, 0, 1], False)
    with pytest.raises(ConfigError, match="--moe-router-topk 1 contradicts"):
        resolved(folder, "--moe-router-topk", "1")
    with pytest.raises(ConfigError, match="--num-experts 8 contradicts"):
        resolved(folder_of(tmp_path / "dense"), "--num-experts", "8")


def test_all_contradictions_are_named_with_both_sources(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(folder_of(tmp_path / "m"), "--num-layers", "8", "--rotary-base", "10000", "--lr", "0.5", lr=0.1)
    text = str(caught.value)
    assert len(caught.value.problems) == 3
    assert "--num-layers 8 contradicts" in text
    assert "config.json, which says 3" in text
    assert "--lr 0.5 contradicts our flag --lr, which says 0.1" in text


def test_abbreviations_are_unknown_flags() -> None:
    assert arguments.check_tokens(["--weight-deca", "0.1"]).problems == ["unknown flag --weight-deca."]


def test_unknown_malformed_and_ineffective_flags_and_repetitions_are_told_together() -> None:
    tokens = "--tensor-model-paralel-size 2 --adam-beta1 much --weight-decay 0.1 --data-path x --weight-decay=0.2 --swiglu yes"
    checked = arguments.check_tokens(tokens.split())
    assert checked.problems == [
        "unknown flag --tensor-model-paralel-size.",
        "argument --adam-beta1: invalid float value: 'much'",
        "--weight-decay is given twice, as '--weight-decay 0.1' and '--weight-decay=0.2': keep one.",
        "--swiglu: 'yes' is more than it takes.",
        "--data-path is for Megatron's own pretraining program and would have no effect here: leave it out.",
    ]
    assert checked.values["weight_decay"] == 0.2


def test_values_say_where_they_come_from(tmp_path: Path) -> None:
    checked = arguments.check_tokens(["--num-layers", "3"], hf_checkpoint=None)
    assert checked.values["num_layers"] == 3
    assert checked.origins["transformer_impl"] == "platform"
    assert "num_layers" not in checked.origins


def test_the_options_that_this_trainer_would_ignore_say_so() -> None:
    options = {flag: option for option in arguments.list_options() for flag in option.flags}
    assert options["--tensor-model-parallel-size"].note == ""
    assert options["--tensor-model-parallel-size"].takes == "INT"
    assert "would have no effect here" in options["--data-path"].note


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--pipeline-model-parallel-layout", "Et|tL"], "not available yet"),
        (["--hierarchical-context-parallel-sizes", "2"], "not available yet"),
        (["--moe-router-load-balancing-type", "seq_aux_loss"], "would count as one sequence"),
        (["--moe-token-dispatcher-type", "allgather"], "only alltoall"),
        (["--moe-grouped-gemm"], "without Transformer Engine"),
        (["--data-path", "x"], "no effect here"),
        (["--optimizer", "sgd"], "only adam"),
        (["--attention-backend", "unfused"], "only auto, flash"),
        (["--apply-query-key-layer-scaling"], "softmax is computed in float32"),
        (["--fp16"], "float16 is not offered"),
        (["--finetune"], "say --no-load-optim"),
        (["--no-load-rng"], "takes no random states"),
        (["--no-save-rng"], "always holds the random states"),
        (["--no-save-optim"], "always holds the optimizer"),
        (["--lr-warmup-samples", "5"], "--lr-warmup-iters"),
        (["--tensor-model-parallel-size", "0"], "must be >= 1, got 0."),
        (["--adam-beta1", "7"], "must be from 0 to 1, got 7.0."),
        (["--weight-decay", "nan"], "must be >= 0, got nan."),
    ],
)
def test_what_would_be_ignored_is_refused(tokens: list[str], message: str) -> None:
    (problem,) = arguments.check_tokens(tokens).problems
    assert message in problem


def test_bounds_are_of_arguments_that_the_trainer_reads() -> None:
    assert BOUNDS.keys() <= HONOURED


@pytest.mark.parametrize("flag", ["--tensor-model-parallel-size", "--context-parallel-size", "--pipeline-model-parallel-size"])
@pytest.mark.parametrize("size", ["0", "-1"])
def test_a_parallel_size_that_is_none_is_one_problem(tmp_path: Path, flag: str, size: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolved(folder_of(tmp_path / "m"), flag, size)
    assert raised.value.problems == [f"{flag} must be >= 1, got {size}."]


def test_tensor_parallelism_must_divide_the_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-model-parallel-size 4 does not divide num_key_value_heads \(2\)"):
        resolved(folder_of(tmp_path / "m"), "--tensor-model-parallel-size", "4", world_size=4)


def test_megatrons_own_refusals_come_through(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Megatron refuses.*world size \(3\)"):
        resolved(folder_of(tmp_path / "m"), "--tensor-model-parallel-size", "2", world_size=3)


@pytest.mark.parametrize("rope", [{"rope_type": "yarn", "factor": 4.0}, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2}])
def test_rope_scalings_that_megatron_lacks_are_refused(tmp_path: Path, rope: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"not available yet|not supported"):
        resolved(folder_of(tmp_path / "m", rope_parameters=rope))


def test_the_module_prints_plain_values_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "m")
    shape = model_shape(folder)
    ops = model_ops(shape, shape.vocab_size)
    save_file(
        {name: torch.zeros(size) for op in ops for name, size in zip(op.hf, op.hf_shapes, strict=True)}, f"{folder}/model.safetensors"
    )
    assert arguments.main(["--hf-checkpoint", folder, "--world-size", "2", "--", "--tensor-model-parallel-size", "2"]) == 0
    values = json.loads(capsys.readouterr().out.splitlines()[-1])["values"]
    assert values["tensor_model_parallel_size"] == 2
    assert values["num_layers"] == 3


def test_a_folder_without_its_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert arguments.main(["--hf-checkpoint", folder_of(tmp_path / "m"), "--"]) == 2
    assert "holds neither model.safetensors nor" in capsys.readouterr().err


def test_the_module_writes_its_problems_and_nothing_else_to_stderr_and_exits_with_2() -> None:
    command = [sys.executable, "-m", "vime.backends.megatron_utils.arguments", "--data-path", "x", "--mamba-state-dim", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert list(json.loads(done.stdout)) == ["values", "origins"]
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["--data-path", "--mamba-state-dim:"]


def test_the_flags_that_slime_declares_anew_are_megatrons() -> None:
    options = {option for action in arguments.build_parser()._actions for option in action.option_strings}
    assert options >= MEGATRON


@pytest.mark.parametrize("flag", ["--expert-model-parallel-size", "--moe-aux-loss-coeff"])
def test_what_is_of_experts_has_no_effect_on_a_dense_model(tmp_path: Path, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} has no effect: .* without experts"):
        resolved(folder_of(tmp_path / "m"), flag, "2", world_size=2)


def test_interleaving_two_stages_without_overlap_is_refused(tmp_path: Path) -> None:
    """Two messages between the same two ranks in one batch get mixed up, and the loss is silently wrong."""
    folder = folder_of(tmp_path / "m", num_hidden_layers=4)
    interleaved = ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"]
    assert resolved(folder, *interleaved, world_size=2).overlap_p2p_comm
    with pytest.raises(ConfigError, match="multiple p2p sends and recvs between same 2 ranks"):
        resolved(folder, *interleaved, "--no-overlap-p2p-communication", world_size=2)
