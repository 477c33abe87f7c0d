"""`vime plan`'s own options, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.config.configs import change, valid_config
from tests.unit.plan.configs import config_json
from vime.cli.plan import OPTIONS, main, plan_options, show, with_own_options
from vime.config import RunConfig
from vime.config.parse import flag_table
from vime.errors import ConfigError
from vime.plan.settings import PlanOptions


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "config.json").write_text(json.dumps(config_json("llama3-8b")))
    return change(valid_config(tmp_path), device="cuda", rollout_max_prompt_len=1024, actor_num_gpus_per_node=8)


def test_its_options_are_taken_out_and_the_rest_is_the_runs() -> None:
    argv = ["--lr", "1e-5", "--gpu", "h100", "--json", "--device-memory=64", "--colocate", "--gpus-per-node", "4"]
    options, as_program, flags = plan_options(argv)
    assert options == PlanOptions(gpu="H100", device_memory=64.0, gpus_per_node=4)
    assert as_program
    assert flags == ["--lr", "1e-5", "--colocate"]


def test_all_wrong_options_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_options(["--gpu", "H900", "--device-memory", "lots", "--gpus-per-node", "0", "--sync-bandwidth"])
    assert [problem.split()[0] for problem in caught.value.problems] == ["--gpu", "--device-memory", "--gpus-per-node", "--sync-bandwidth"]
    assert "Known are H200" in caught.value.problems[0]


def test_help_on_a_topic_is_that_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help=--lr"]) == 0
    assert "--lr FLOAT" in capsys.readouterr().out


def test_an_option_given_twice_is_told() -> None:
    with pytest.raises(ConfigError, match="--gpu is given twice, as 'H100' and 'A100'"):
        plan_options(["--gpu", "h100", "--gpu", "A100"])
    assert plan_options(["--gpu", "h100", "--gpu", "H100"])[0].gpu == "H100"


def test_more_processes_than_can_be_listed_are_refused(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match="at most 4096 processes, this would be"):
        show(change(config, rollout_num_gpus=10**9), PlanOptions(), as_program=False, not_runnable=[])


def test_its_options_are_nobody_elses() -> None:
    assert not set(OPTIONS) & set(flag_table())


def test_a_mistyped_option_is_explained() -> None:
    problems = with_own_options(["unknown flag --device-memori: nearest ...", "--lr must be >= 0, got -1."])
    assert problems == ["unknown flag --device-memori: nearest ... Of vime plan's own: --device-memory.", "--lr must be >= 0, got -1."]


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    for asked in ("--help", "--help=--gpu"):
        assert main([asked]) == 0
        shown = capsys.readouterr().out
        assert all(flag in shown for flag in OPTIONS)


def test_a_small_model_is_counted_in_millions_and_a_cpu_has_engines_of_one(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json("qwen3-0.6b")))
    show(change(config, device="cpu", actor_num_gpus_per_node=1), PlanOptions(), as_program=False, not_runnable=[])
    shown = capsys.readouterr().out
    assert "Qwen3ForCausalLM, 596.0 M parameters;" in shown
    assert "--rollout-num-gpus-per-engine 1 is right as it is: on a CPU" in shown


def test_a_plan_that_fits_exits_0_and_says_everything(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(config, PlanOptions(), as_program=False, not_runnable=["--device cuda is not available yet: use cpu."]) == 0
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM, 8.03 B parameters; 139.80 GiB a GPU (H200), 8 a node" in shown
    for word in (
        "... to trainer 7",
        "KV cache of one engine",
        "trainer: optimizer",
        "weight sync: 14.96 GiB",
        "It fits.",
        "node 0 (host memory)",
    ):
        assert word in shown
    assert "not runnable yet: --device cuda is not available yet: use cpu." in shown


def test_a_plan_that_does_not_fit_exits_2_and_offers_what_does(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(config, PlanOptions(gpu="A100-40"), as_program=False, not_runnable=[]) == 2
    shown = capsys.readouterr().out
    assert "TOO MUCH" in shown
    assert "It does not fit:\n  GPU 0-7 (trainer): needs " in shown
    assert "The nearest settings that fit:\n  1. --" in shown


def test_json_holds_what_the_text_says(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(config, PlanOptions(gpu="A100-40"), as_program=True, not_runnable=["x"]) == 2
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is False
    assert plan["refusals"]
    assert plan["offers"]
    assert plan["not_runnable_yet"] == ["x"]
    assert plan["model"]["parameters"] == 8_030_261_248
    assert len(plan["processes"]) == 3 + 1 + 8
    device = plan["devices"][0]
    assert device["peak"] == sum(item["num_bytes"] for item in device["phases"][device["peak_phase"]])
