"""Trainer processes, one and two, that go through all cases, started once a session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.megatron.conftest import free_ports

ROOT = Path(__file__).parents[3]
DEADLINE_S = 280
TOKEN_KL = {"reinforce_plus_plus": True, "reinforce_plus_plus_baseline": True, "ppo": True}
WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
HOOKS = "tests.integration.algorithms.own_hooks."
CALLED = {
    "custom_megatron_init_path": HOOKS + "init",
    "custom_megatron_before_log_prob_hook_path": HOOKS + "before_log_prob",
    "custom_megatron_before_train_step_hook_path": HOOKS + "before_train_step",
}
FORGETFUL = {"reset": "reset_optimizer_states", "stateless": "use_stateless_adam"}
ESTIMATORS = ("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")


def make_models(folder: Path) -> dict[str, str]:
    """Three tiny random models of one shape: policy, reference, teacher."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=90, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=128, initializer_range=0.1, tie_word_embeddings=True,
    )  # fmt: skip
    for seed, name in enumerate(("policy", "reference", "teacher")):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(folder / name)
    return {name: str(folder / name) for name in ("policy", "reference", "teacher")}


def cases_of(models: dict[str, str], folder: Path) -> list[dict[str, Any]]:
    model = {"hf_checkpoint": models["policy"]}
    both = model | {"ref_load": models["reference"]}
    cases: list[dict[str, Any]] = []
    for name in ESTIMATORS:
        algorithm: dict[str, Any] = {
            "advantage_estimator": name,
            "use_tis": True,
            "use_opsm": True,
            "normalize_advantages": name in WHITENED,
        }
        algorithm |= {"tis_batch_normalize": name == "rloo"}
        algorithm |= {"gamma": 0.95, "lambd": 0.9} if name == "ppo" else {}
        algorithm |= (
            {"kl_coef": 0.2, "kl_loss_type": "k1"} if name in TOKEN_KL else {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}
        )
        algorithm |= {"use_rollout_entropy": name == "gspo"}
        cases.append({"name": name, "kind": "train", "model": both, "algorithm": algorithm, "values": name == "ppo"})
    distil = {"use_opd": True, "opd_type": "megatron", "opd_kl_coef": 0.5}
    moving = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2"}
    learn = {"kind": "critic", "model": model, "critic": {"critic_lr": 2e-2, "value_clip": 10.0}}
    return [*cases,
        {"name": "opd", "kind": "train", "model": model | {"opd_teacher_load": models["teacher"]}, "algorithm": distil},
        {"name": "moving", "kind": "train", "model": both | {"ref_update_interval": 2}, "algorithm": moving, "count": 4,
         "save": str(folder / "moving")},
        {"name": "moved", "kind": "train", "model": both | {"ref_update_interval": 2}, "algorithm": moving, "first": 4, "count": 1,
         "load": str(folder / "moving")},
        {"name": "still", "kind": "train", "model": both, "algorithm": moving, "count": 4},
        {"name": "stale", "kind": "train", "model": model | {"keep_old_actor": True}, "count": 2},
        {"name": "critic_first", "kind": "train", "model": model, "algorithm": {"advantage_estimator": "ppo"}, "values": True,
         "critic": {"num_critic_only_steps": 1}, "save": str(folder / "critic_first")},
        *({"name": name, "kind": "train", "model": model, "training": {flag: True, "log_probs_chunk_size": 3}, "steps": 2, "count": 3}
          for name, flag in FORGETFUL.items()),
        {"name": "stateless_half", "kind": "train", "model": model, "training": {"use_stateless_adam": True}, "steps": 2, "count": 2,
         "save": str(folder / "stateless")},
        {"name": "stateless_rest", "kind": "train", "model": model, "training": {"use_stateless_adam": True}, "steps": 2, "first": 2,
         "load": str(folder / "stateless")},
        {"name": "steps", "kind": "train", "model": model, "steps": 2, "count": 3},
        {"name": "hooked", "kind": "train", "model": both, "algorithm": moving, "training": CALLED, "steps": 2, "count": 2},
        {"name": "postprocessed", "kind": "train", "model": model, "training": {"rollout_data_postprocess_path": HOOKS + "postprocess"}},
        {"name": "provided", "kind": "train", "model": model | {"custom_model_provider_path": HOOKS + "provide"}},
        {"name": "critic", **learn, "count": 30, "training": CALLED},
        {"name": "critic_frozen", **learn, "count": 2, "training": {"freeze_params_name_list": ["embedding", r"layers\.0"]}},
        {"name": "critic_half", **learn, "count": 15, "save": str(folder / "critic")},
        {"name": "critic_rest", **learn, "count": 15, "load": str(folder / "critic")},
    ]  # fmt: skip


LAYOUTS = {
    "dp2": [],
    "tp2": ["--tensor-model-parallel-size", "2"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
    "cp2": ["--context-parallel-size", "2"],
}
SPREAD = (  # what looks at whole sequences or all samples, or is the user's
    ("gspo", "cp2"), ("reinforce_plus_plus", "dp2"), ("ppo", "pp2"), ("ppo", "cp2"), ("postprocessed", "pp2"), ("provided", "pp2"),
)  # fmt: skip


def cases_of_two(one: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some of the cases of one process, for two."""
    named = {case["name"]: case for case in one}
    cases = [{**named[name], "name": f"{name}_{layout}", "tokens": LAYOUTS[layout]} for name, layout in SPREAD]
    return cases + [{**named["critic"], "name": f"critic_{layout}", "tokens": tokens, "count": 3} for layout, tokens in LAYOUTS.items()]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """role -> folder."""
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def results(tmp_path_factory, models):
    """results(case, rank=0): what a rank of the case stored."""
    folder = tmp_path_factory.mktemp("algorithms")
    one = cases_of(models, folder)
    processes = []
    for world, cases in ((1, one), (2, cases_of_two(one))):
        (folder / f"cases_{world}.json").write_text(json.dumps(cases))
        ports = free_ports(len(cases))
        for rank in range(world):
            command = [sys.executable, "-m", "tests.integration.algorithms.worker", str(folder), str(world), str(rank), *ports]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            log = folder / f"log_{world}_{rank}.txt"
            with log.open("w") as out:
                processes.append((log, subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)))
    try:
        for log, process in processes:
            assert process.wait(timeout=DEADLINE_S) == 0, f"{log.name}:\n{log.read_text()[-4000:]}"
    finally:
        for _, process in processes:
            process.kill()
            process.wait()
    return lambda name, rank=0: torch.load(folder / f"{name}.{rank}.pt", weights_only=False)
