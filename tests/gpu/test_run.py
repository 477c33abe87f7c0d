"""A whole run on one GPU: trainer and engine colocated, taking turns. What it asks for is refused until this has passed once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from examples.quickstart.make_assets import AssetSpec, make_assets

ROOT = Path(__file__).parents[2]
RUN = """
import sys
from vime.cli.train import train
from vime.utils.arguments import parse_args
train(parse_args(sys.argv[1:], planned=True))
"""


def test_a_colocated_run_trains_syncs_saves_and_resumes(tmp_path: Path) -> None:
    spec = AssetSpec(hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=256, num_train=64, num_heldout=16)
    assets = make_assets(tmp_path / "assets", spec)
    command = [
        sys.executable, "-c", RUN, "--device", "cuda", "--colocate",
        "--hf-checkpoint", str(assets["model"]), "--prompt-data", str(assets["train"]), "--apply-chat-template",
        "--rm-type", "random", "--advantage-estimator", "grpo", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
        "--rollout-max-response-len", "16", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "1024", "--lr", "1e-4",
        "--eval-prompt-data", "heldout", str(assets["heldout"]), "--eval-interval", "2",
        "--save", str(tmp_path / "run"), "--save-interval", "2", "--save-hf", str(tmp_path / "hf"),
        "--vllm-max-cudagraph-capture-size", "16", "--vllm-kv-cache-memory-bytes", str(2**31), "--vllm-gpu-memory-utilization", "0.1",
    ]  # fmt: skip
    for steps in (2, 3):
        done = subprocess.run([*command, "--num-rollout", str(steps)], cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/step" in row]
    assert len(trained) == 3
    assert all(row["train/train_rollout_logprob_abs_diff"] < 0.05 for row in trained)
