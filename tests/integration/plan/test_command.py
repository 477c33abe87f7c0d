"""The commands themselves, with every owner's parser."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.quickstart.make_assets import AssetSpec, make_assets
from examples.quickstart.recipe import grpo_flags, sft_flags
from tests.unit.plan.configs import config_json

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]


def vime(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "vime.cli.main", *words], capture_output=True, text=True, timeout=280, cwd=ROOT, check=False
    )


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    make_assets(folder / "assets", AssetSpec(num_sft=8, num_train=8, num_heldout=8))
    return folder


def test_what_cannot_run_here_is_planned_from_config_json_alone(tmp_path: Path, quickstart: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json("qwen3-30b-a3b")))
    flags = [
        *("--device", "cuda", "--hf-checkpoint", str(tmp_path), "--prompt-data", str(quickstart / "assets" / "train.jsonl")),
        *("--rm-type", "math", "--rollout-batch-size", "32", "--n-samples-per-prompt", "8", "--num-rollout", "10", "--colocate"),
        *("--actor-num-gpus-per-node", "8", "--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "2"),
        *("--tensor-model-parallel-size", "4", "--sequence-parallel", "--expert-model-parallel-size", "8"),
        *("--expert-tensor-parallel-size", "1", "--rollout-max-context-len", "9216", "--rollout-max-response-len", "8192"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "9216", "--recompute-granularity", "full"),
        *("--recompute-method", "uniform", "--recompute-num-layers", "1", "--vllm-max-num-seqs", "64"),
    ]
    done = vime("plan", "--json", *flags)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    plan = json.loads(done.stdout)
    assert plan["fits"]
    assert any(line.startswith("--device cuda is not available yet") for line in plan["not_runnable_yet"])
    assert plan["kv_cache"]["wanted"] == 64, "vLLM's own flags are read"
    ranks = [process["coordinates"] for process in plan["processes"] if process["role"] == "trainer"]
    assert [rank["ep"] for rank in ranks] == list(range(8))
    assert plan["devices"][0]["phases"]["train"]


def test_a_wrong_flag_is_refused_as_by_train(quickstart: Path) -> None:
    done = vime("plan", *sft_flags(quickstart), "--max-token-per-gpu", "5")
    assert done.returncode == 2
    assert "--max-tokens-per-gpu" in done.stderr


def test_a_dry_run_plans_what_would_start(quickstart: Path) -> None:
    done = vime("train", *sft_flags(quickstart), "--dry-run")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.rstrip().endswith("It fits.")
    assert "engines" not in done.stdout.splitlines()[2]
    missing = vime("train", *grpo_flags(quickstart), "--dry-run")
    assert missing.returncode == 2
    assert "--hf-checkpoint" in missing.stderr, "its model is made by the first stage"
