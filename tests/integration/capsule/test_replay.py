"""A recorded step comes out the same again, under other layouts within rounding; one small change is found in its stage and place."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.integration.capsule.conftest import STEP
from tests.integration.capsule.spoiling import ELEMENT, HF_WEIGHT, SAMPLE
from tests.integration.cli.test_documents import matches
from tests.rules.source import ROOT
from vime.capsule.folder import read_capsule
from vime.capsule.results import STAGES
from vime.cli.main import main
from vime.rollout.recorded import read_groups

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

Replayed = Callable[[str], tuple[int, list[str]]]
STAGES_OF_TWO = [*STAGES[:5], *(f"optimizer step {step}, {stage}" for step in range(2) for stage in STAGES[5:])]
SAME = [f"{stage}: the same" for stage in STAGES_OF_TWO] + ["the same"]
SHOWN = re.findall(r"```console\n\$ vime (replay .*?)\n(.*?)```", (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8"), re.DOTALL)
TP2, PP2 = ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]
CP2, EP2 = ["--context-parallel-size", "2"], ["--expert-model-parallel-size", "2"]


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_the_documents_commands_print_what_is_shown(
    command: str, shown: str, capsules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "capsules").symlink_to(capsules / "dense_capsules")
    code = main(shlex.split(command))
    out, err = capsys.readouterr()
    assert code == (1 if "first stage that differs" in shown else 0), out + err
    assert matches(shown.replace(", threads 1 instead of 2", "").splitlines(), out.splitlines()), out + err


@pytest.mark.parametrize(
    ("capsule", "layout"),
    [("moe", [*TP2, "--sequence-parallel"]), ("moe", [*PP2]), ("values", CP2), ("values", [])],
    ids=["moe sp2", "moe pp2", "values cp2", "values dp2"],
)
def test_another_layout_gives_the_same_within_rounding(
    capsules: Path, capsule: str, layout: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(capsules / f"{capsule}_capsules" / STEP), "--actor-num-gpus-per-node", "2", *layout]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("world 2 instead of 1: within rounding")
    assert lines[2:] == SAME


@pytest.mark.parametrize("name", ["same moe", "same start"])
def test_the_same_layout_gives_the_same_bits(replayed: Replayed, name: str) -> None:
    code, lines = replayed(name)
    assert lines[1:] == ["the recorded layout: bit for bit", *SAME]
    assert code == 0


def test_a_step_that_failed_fails_in_the_same_way(replayed: Replayed, capsules: Path) -> None:
    code, lines = replayed("same failing")
    (was,) = [line for line in lines if line.startswith("the recorded step failed: loss ")]
    assert was.replace("the recorded step", "the replay") in lines
    assert (code, lines[-1]) == (0, "the same")
    facts, items = read_capsule(capsules / "failing_capsules" / STEP)
    assert "not finite" in facts["failure"]
    assert {item.stage for item in items} == set(STAGES[:7])  # it ended before the weights changed


def test_a_replay_that_does_not_fail_as_the_step_did_differs(replayed: Replayed) -> None:
    code, lines = replayed("unchecked")
    assert any(line.startswith("the recorded step failed: loss ") for line in lines)
    assert (code, lines[-1]) == (1, "what both computed is the same, but the recorded step alone failed")


@pytest.mark.parametrize(
    ("name", "stage", "line"),
    [
        ("token", "tokenize", rf"tokenize: tokens differs by \S+ at sample {SAMPLE}, token \d+"),
        ("prompt", "tokenize", rf"tokenize: the prompt's tokens differs at sample {SAMPLE}: \d+ values instead of \d+"),
        ("mask", "pack", rf"pack: loss mask differs by 1 at sample {SAMPLE}, token 1"),
        ("weight", "forward", rf"forward: weights differs by 0\.0001 at {re.escape(HF_WEIGHT)}, element {ELEMENT}"),
        ("log_prob", "log-prob", rf"log-prob: engine's log-probs differs by \S+e-07 at sample {SAMPLE}, token 2"),
        ("reward", "advantage", rf"advantage: reward differs by 0\.0001 at sample {SAMPLE}"),
        ("loss", "loss", r"optimizer step 0, loss: metrics differs by \S+ at loss.*"),
        ("gradient", "gradient", rf"optimizer step 0, gradient: gradients differs by 0\.001 at {re.escape(HF_WEIGHT)}, element {ELEMENT}"),
        ("moment", "update", rf"optimizer step 0, update: weights differs by \S+ at \S+, element {ELEMENT}"),
        ("rate", "update", r"optimizer step 0, update: learning rate differs by \S+ at all"),
    ],
)
def test_one_small_change_is_found_in_its_stage_and_place(replayed: Replayed, name: str, stage: str, line: str) -> None:
    code, lines = replayed(name)
    assert (code, lines[-1]) == (1, f"first stage that differs: {stage}")
    before = STAGES_OF_TWO[: STAGES.index(stage)]
    assert lines[2 : 2 + len(before)] == [f"{one}: the same" for one in before]
    assert re.fullmatch(line, lines[2 + len(before)]), lines


def test_recording_changes_no_bit_of_what_is_trained(capsules: Path) -> None:
    recorded, plain = (torch.load(capsules / f"{name}.weights.pt", weights_only=True) for name in ("dense", "unrecorded"))
    assert set(recorded) == set(plain)
    assert all(torch.equal(recorded[name], plain[name]) for name in plain)


def test_a_capsule_holds_what_the_step_was_computed_from(capsules: Path) -> None:
    facts, items = read_capsule(capsules / "moe_capsules" / STEP)
    assert (facts["rollout_id"], facts["optimizer_steps"], facts["weight_versions"]) == (1, 2, [1, 1])
    assert facts["layout"]["world"] == 1
    found = {(item.stage, item.name) for item in items}
    assert {("pack", "kept tokens"), ("forward", "routing"), ("forward", "random states"), ("log-prob", "old log-probs")} <= found
    groups = read_groups(capsules / "moe_capsules" / STEP / "samples.jsonl", 1)
    routing = next(item for item in items if item.name == "routing")
    lengths = {f"sample {sample.index}": len(sample.tokens) for group in groups for sample in group}
    for label, row in zip(routing.labels, routing.rows, strict=True):
        assert row.shape == (lengths[label], 2, 2)  # tokens, layers, experts of each
        assert row.min() >= 0
        assert row.max() < 4
        assert (row[..., 0] < row[..., 1]).all()


def test_a_disk_that_is_full_costs_the_capsule_and_nothing_else(capsules: Path) -> None:
    left = json.loads((capsules / "left.json").read_text())
    if left is None:
        pytest.skip("this user may not mount a small disk")
    assert left == ["capsules"]
    assert "no capsule of rollout step 1: no space left" in (capsules / "log.txt").read_text()
    full, plain = (torch.load(capsules / f"{name}.weights.pt", weights_only=True) for name in ("full", "unrecorded"))
    assert all(torch.equal(full[name], plain[name]) for name in plain)


def test_details_hold_what_was_trained_on_and_what_came_of_it(capsules: Path) -> None:
    dump = torch.load(capsules / "details" / "train_data" / "1.pt", weights_only=True)
    data = dump["rollout_data"]
    assert (dump["rollout_id"], data["sample_indices"]) == (1, list(range(12, 24)))
    assert dump["metrics"]["train/num_steps"] == 2
    _, items = read_capsule(capsules / "values_capsules" / STEP)
    kept = {(item.stage, item.name): item for item in items if item.step is None}
    names = {
        "tokens": ("tokenize", "tokens"), "log_probs": ("log-prob", "old log-probs"), "values": ("advantage", "values"),
        "ref_log_probs": ("log-prob", "reference's log-probs"), "rollout_log_probs": ("log-prob", "engine's log-probs"),
        "advantages": ("advantage", "advantages"), "returns": ("advantage", "returns"), "loss_weights": ("pack", "weight in the mean"),
    }  # fmt: skip
    for name, key in names.items():
        assert [row.tolist() for row in data[name]] == [row.tolist() for row in kept[key].rows], name
    for i, mask in enumerate(data["loss_masks"]):
        assert data["total_lengths"][i] == len(data["tokens"][i])
        assert data["response_lengths"][i] == len(mask) == len(data["advantages"][i])
        assert mask[-1] == 0  # the token that nobody sampled
    assert set(data["optimizer_steps"]) == {0, 1}


def test_what_cannot_be_replayed_says_why(capsules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*argv: str) -> str:
        assert main(["replay", *argv]) == 2
        return capsys.readouterr().err

    assert "is no step capsule" in refused(str(tmp_path))
    assert "takes the capsule's folder first" in refused("--eps-clip", "0.1")
    assert "--eps-clip takes a number" in refused(str(capsules / "dense_capsules" / STEP), "--eps-clip", "high")
    assert "cannot be divided by the model's parallel size 2" in refused(str(capsules / "dense_capsules" / STEP), *TP2)
    torn = tmp_path / "torn"
    shutil.copytree(capsules / "dense_capsules" / STEP, torn)
    (torn / "samples.jsonl").write_text("{}\n")
    assert "is torn: samples.jsonl has 3 bytes" in refused(str(torn))
    gone = tmp_path / "gone"
    shutil.copytree(capsules / "start_capsules" / "step_0000000", gone)
    facts = json.loads((gone / "capsule.json").read_text())
    facts["state"] = {"path": str(tmp_path / "iter_0000000" / "trainer"), "resume": True}
    (gone / "capsule.json").write_text(json.dumps(facts))
    assert "is gone: the capsule refers to it" in refused(str(gone))
    (tmp_path / "iter_0000000" / "trainer").mkdir(parents=True)
    assert "is no complete trainer state" in refused(str(gone))  # the trainer process says so
