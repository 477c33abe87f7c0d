"""The command line against the parsers of all its owners."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from examples.quickstart.make_assets import AssetSpec, make_assets
from tests.unit.config.test_suggest import edited_flags
from vime.config.options import Option
from vime.config.owners import OWNERS, options_of
from vime.config.parse import flag_table, own_flags
from vime.config.show import shown
from vime.config.suggest import Names, with_prefix
from vime.errors import ConfigError
from vime.utils.arguments import parse_args

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def options() -> dict[str, list[Option]]:
    return options_of(*OWNERS)


def names_of(options: dict[str, list[Option]], owner: str) -> set[str]:
    """An owner's options as they are typed here."""
    return {with_prefix(flag, owner) for option in options[owner] for flag in option.flags}


def test_every_mistake_of_every_owner_is_told_at_once(tmp_path: Path, options: dict[str, list[Option]]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lr: fast\nkl-loss-coef: 0.1\nvllm:\n  max-num-seq: 3\nadam-beta1: much\n")
    argv = "--vllm-max-num-seqs many --vllm-port 3 --router-polcy random --vllm-router-ip 127.0.0.1 --tensor-parallel-size 2"
    argv += " --weight-deca 0.1 --data-path x --num-rollout 1 --config " + str(file)
    with pytest.raises(ConfigError) as caught:
        parse_args(argv.split())
    expected = [
        f"--lr takes a number, got 'fast'. ({file}:1)",
        "--rollout-batch-size is required: Prompts per rollout step.",
        f"argument --adam-beta1: invalid float value: 'much' ({file}:5)",
        "unknown flag --tensor-parallel-size: the trainer's tensor parallelism is --tensor-model-parallel-size (Megatron), "
        "an engine's is --rollout-num-gpus-per-engine.",
        "unknown flag --weight-deca. Nearest: --weight-decay (Megatron).",
        "--data-path is for Megatron's own pretraining program and would have no effect here: leave it out.",
        "--vllm-port is set by vime itself: leave it out (a free port is found).",
        f"unknown flag --vllm-max-num-seq. Nearest: --vllm-max-num-seqs (vLLM). ({file}:4)",
        "argument --vllm-max-num-seqs: invalid int value: 'many'",
        "unknown flag --router-polcy. Nearest: --router-policy (vllm-router).",
    ]
    told = caught.value.problems
    assert [problem for problem in expected if problem not in told] == [], told
    assert [problem for problem in told if "--use-kl-loss and --kl-loss-coef go together" in problem], "a rule of ours is not told"
    assert [problem for problem in told if "--vllm-router-ip and --vllm-router-port go together" in problem]


def test_a_printed_configuration_gives_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_assets(tmp_path / "assets", AssetSpec())["model"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    base = tmp_path / "base.toml"
    base.write_text(f'hf-checkpoint = "{model}"\nprompt-data = "p.jsonl"\nlr = 1e-4\nrm-type = "math"\n[router]\npolicy = "random"\n')
    argv = "--config base.toml --rollout-batch-size 4 --n-samples-per-prompt 2 --num-rollout 1 --lr 2e-4 --weight-decay 0.1"
    config = parse_args(argv.split())
    assert (config.training.lr, config.sources["lr"], config.sources["rm_type"]) == (2e-4, "command line", "base.toml:4")
    printed = shown(config)
    assert "#   num_layers: 4  # from the model folder" in printed
    assert "#   adam_beta1: 0.9  # Megatron default" in printed
    (tmp_path / "printed.yaml").write_text(printed)
    again = parse_args(["--config", "printed.yaml"])
    differing = [f.name for f in dataclasses.fields(config) if f.compare and getattr(again, f.name) != getattr(config, f.name)]
    assert differing == []


def test_no_flag_of_ours_one_edit_away_is_taken_by_another_owner_unless_it_is_listed(options: dict[str, list[Option]]) -> None:
    every = set().union(*(names_of(options, owner) for owner in OWNERS))
    names = Names(options)
    taken = {(flag, wrong) for flag, wrong in edited_flags() if wrong in every}
    assert taken == set()
    missed = [(flag, wrong) for flag, wrong in edited_flags() if wrong.startswith("--") and flag not in names.explain(wrong)]
    assert missed == []


def test_taking_a_switch_back_is_nobody_elses_flag(options: dict[str, list[Option]]) -> None:
    extra = set(own_flags()) - set(flag_table())
    assert not extra & set().union(*(names_of(options, owner) for owner in OWNERS))


def test_the_flags_that_errors_advise_exist(options: dict[str, list[Option]]) -> None:
    names = Names(options)
    for typed, meant in (
        ("--max-num-seqs", "--vllm-max-num-seqs (vLLM)"),
        ("--vllm-router-cache-threshold", "--router-cache-threshold (vllm-router)"),
        ("--vllm-adam-beta1", "--adam-beta1 (Megatron)"),
        ("--enable-prefix-caching", "--vllm-enable-prefix-caching (vLLM)"),
        ("--router-ip", "--vllm-router-ip (vime, router)"),
    ):
        assert meant in names.explain(typed)
