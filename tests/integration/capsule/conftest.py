"""Capsules of small models, recorded once a session by one process, which also replays spoilt copies of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.conftest import make_tiny_model
from tests.integration.megatron.conftest import free_ports, small_disk

ROOT = Path(__file__).parents[3]
DEADLINE_S = 560
SPOILT = {"token": "dense", "prompt": "dense", "mask": "dense", "weight": "dense", "log_prob": "dense", "reward": "moe", "moment": "dense"}
STEP = "step_0000001"
FULL = "full"  # the small disk


def make_models(folder: Path) -> None:
    """FOLDER/dense and FOLDER/moe, with one tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    make_tiny_model(folder / "dense")
    shutil.copytree(folder / "dense", folder / "moe")
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=512, tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, norm_topk_prob=True, pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "moe")
    (folder / "prompts.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')


def flags_of(folder: Path, model: str, name: str, *more: str, steps: str | None = "1") -> list[str]:
    """Two optimizer steps a rollout step, several micro-batches each."""
    recorded = [] if steps is None else ["--capsule-steps", steps, "--capsule-dir", str(folder / name)]
    return [
        "--hf-checkpoint", str(folder / model), "--prompt-data", str(folder / "prompts.jsonl"), "--label-key", "label", "--rm-type", "math",
        "--rollout-batch-size", "3", "--n-samples-per-prompt", "4", "--num-rollout", "4", "--num-steps-per-rollout", "2",
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", "48", "--rollout-top-k", "3", "--train-threads", "1", *recorded,
        *(() if "--lr" in more else ("--lr", "1e-3")), *more,
    ]  # fmt: skip


def jobs_of(folder: Path) -> list[dict[str, Any]]:
    """See `worker`."""
    balance = ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.1")
    details = ("--dump-details", str(folder / "details"), "--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-load", str(folder / "dense"))
    recorded = {
        "dense": flags_of(folder, "dense", "dense_capsules"),
        "unrecorded": flags_of(folder, "dense", "", steps=None),
        "moe": flags_of(folder, "moe", "moe_capsules", *balance, "--use-routing-replay"),
        "values": flags_of(folder, "dense", "values_capsules", "--advantage-estimator", "ppo", *details),
        "start": flags_of(folder, "dense", "start_capsules", "--capsule-state", "referenced", steps="0"),
        "failing": flags_of(folder, "dense", "failing_capsules", "--lr", "1e30"),
        "full": flags_of(folder, "dense", f"{FULL}/capsules"),
    }
    jobs: list[dict[str, Any]] = [
        {"kind": "record", "flags": flags, "weights": str(folder / f"{name}.weights.pt")} for name, flags in recorded.items()
    ]
    replays: dict[str, tuple[str, list[str], str | None]] = {
        "same moe": (f"moe_capsules/{STEP}", [], None),
        "same failing": (f"failing_capsules/{STEP}", [], None),
        "unchecked": (f"failing_capsules/{STEP}", ["--no-check-for-nan-in-loss-and-grad"], None),
        "same start": ("start_capsules/step_0000000", [], None),
        "gradient": (f"dense_capsules/{STEP}", [], "one_gradient"),
        "loss": (f"dense_capsules/{STEP}", ["--entropy-coef", "0.01"], None),
        "rate": (f"dense_capsules/{STEP}", ["--lr", "2e-3"], None),
    }
    for how, model in SPOILT.items():
        copy = folder / f"spoilt_{how}"
        jobs.append({"kind": "spoil", "capsule": str(folder / f"{model}_capsules" / STEP), "copy": str(copy), "how": how})
        replays[how] = (copy.name, [], None)
    for name, (capsule, flags, code) in replays.items():
        out = str(folder / f"{name}.json")
        jobs.append({"kind": "replay", "argv": [str(folder / capsule), *flags], "out": out, "code": code})
    for job, port in zip(jobs, free_ports(len(jobs)), strict=True):
        job["port"] = int(port)
    return jobs


@pytest.fixture(scope="session")
def capsules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all of it."""
    folder = tmp_path_factory.mktemp("capsules")
    make_models(folder)
    (folder / "jobs.json").write_text(json.dumps(jobs_of(folder)))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.integration.capsule.worker", str(folder / "jobs.json")]
    with small_disk(folder / FULL), (folder / "log.txt").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, (folder / "log.txt").read_text()[-4000:]
        full = sorted(f.name for f in (folder / FULL).rglob("*")) if (folder / FULL).is_mount() else None
        (folder / "left.json").write_text(json.dumps(full))
    return folder


@pytest.fixture(scope="session")
def replayed(capsules: Path) -> Callable[[str], tuple[int, list[str]]]:
    """replayed(name): (exit code, lines) of one of the worker's replays."""

    def read(name: str) -> tuple[int, list[str]]:
        found = json.loads((capsules / f"{name}.json").read_text())
        return found["code"], found["said"]

    return read
