"""Trainer processes of one and of two ranks, started once a session; the tests look at what they stored."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import add_prediction, write_model

WORKER = Path(__file__).with_name("worker.py")
Results = Callable[..., dict[str, Any]]
DEADLINE_S = 280
FAMILIES = {"qwen3": "", "qwen2": "", "llama": "", "qwen3_moe": "experts", "deepseek_v3": "experts", "qwen3_next": "experts", "qwen3_5": ""}
PREDICTING = "deepseek_v3_mtp"  # with a layer for multi-token prediction that is trained
FULL = "full"  # the small disk
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
OWN_LOSS = {"loss_type": "custom_loss", "custom_loss_function_path": "own_losses.policy_gradient"}


def make_models(folder: Path) -> dict[str, str]:
    """Tiny random models, one a family, with weights large enough for a wrong sum to show."""
    models = {name: str(write_model(name, folder / name)) for name in FAMILIES}
    return models | {PREDICTING: str(add_prediction(write_model("deepseek_v3", folder / PREDICTING)))}


def cases_of(models: dict[str, str], folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The cases by number of processes."""
    tp2 = ["--tensor-model-parallel-size", "2"]
    sp2 = [*tp2, "--sequence-parallel"]
    grads: dict[str, Any] = {"gradients": True}
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "entropy_coef": 0.01}
    one, two = [], []
    for family in FAMILIES:
        path = models[family]
        one.append({"name": f"{family}_1", "model": path, **grads})
        if "experts" not in FAMILIES[family]:  # with experts Megatron refuses tensor without sequence parallelism
            two.append({"name": f"{family}_tp2", "model": path, "tokens": tp2, **grads})
        else:
            two.append({"name": f"{family}_pp2", "model": path, "tokens": ["--pipeline-model-parallel-size", "2"], **grads})
            two.append({"name": f"{family}_ep2", "model": path, "tokens": ["--expert-model-parallel-size", "2"], **grads})
        two.append({"name": f"{family}_sp2", "model": path, "tokens": sp2, **grads})
    predicting: dict[str, Any] = {"model": models[PREDICTING], "training": {"enable_mtp_training": True}, **grads}
    one.append({"name": f"{PREDICTING}_1", **predicting})
    two.append({"name": f"{PREDICTING}_sp2", "tokens": sp2, **predicting})
    two.append({"name": f"{PREDICTING}_ep2", "tokens": ["--expert-model-parallel-size", "2"], **predicting})
    path = models["qwen3"]
    more = {"model": path, "first": 2, "load": str(folder / "save_1")}
    one += [
        {"name": "again", "model": path, "gradients": True},
        {"name": "four_micro", "model": path, "micro": 4, "gradients": True},
        {"name": "four_steps", "model": path, "count": 4, "save_behind": str(folder / "behind_1")},
        {"name": "two_after", "model": path, "first": 2, "count": 2, "load": str(folder / "behind_1")},
        {
            "name": "two_steps",
            "model": path,
            "count": 2,
            "refused_save": str(folder / "refused_1"),
            "save": str(folder / "save_1"),
            "save_hf": str(folder / "hf_1"),
        },
        {"name": "two_more", "model": path, "first": 2, "count": 2, "load": str(folder / "save_1")},
        {"name": "one_more", **more},
        {"name": "anew", **more, "resume": False, "lr": 8e-4},
        {"name": "weights_alone", **more, "resume": False, "no_load_optim": True},
        {"name": "torn", **more, "tear": str(folder / "torn")},
        {"name": "foreign", "model": models["qwen2"], "load": str(folder / "save_1")},
        {"name": "missing", "model": path, "load": str(folder / "nowhere")},
        {"name": "from_export", "model": str(folder / "hf_1"), "first": 2},
        {"name": "longer", **more, "num_rollout": 20},
        {"name": "higher", **more, "lr": 2e-3},
        {"name": "saved_schedule", **more, "lr": 2e-3, "tokens": ["--use-checkpoint-opt-param-scheduler"]},
        {"name": "evaluates", **more, "count": 0, "num_rollout": 0, "tokens": ["--lr-warmup-iters", "5"]},
        {"name": "several_steps", "model": path, "steps": 3},
        {"name": "kl", "model": path, "ref": path, "algorithm": kl, "count": 2},
        {"name": "nan", "model": path, "nan_at": 5},
        {"name": "recompute", "model": path, "tokens": RECOMPUTE, **grads},
        {"name": "own_loss", "model": path, "algorithm": OWN_LOSS, **grads},
        {"name": "sft", "model": path, "algorithm": {"loss_type": "sft_loss"}, "count": 3},
        {"name": "sft_hot", "model": path, "algorithm": {"loss_type": "sft_loss"}, "temperature": 0.5},
    ]
    two += [
        {"name": "dp2", "model": path, **grads},
        {"name": "dp2_overlap", "model": path, "tokens": ["--overlap-grad-reduce", "--overlap-param-gather"], "count": 2},
        {"name": "dp2_four", "model": path, "count": 4, "save_behind": str(folder / "behind_dp2")},
        {"name": "dp2_after", "model": path, "first": 2, "count": 2, "load": str(folder / "behind_dp2")},
        {"name": "dp2_two", "model": path, "count": 2, "refused_save": str(folder / "refused_dp2"), "save": str(folder / "save_dp2")},
        {"name": "dp2_more", "model": path, "first": 2, "count": 2, "load": str(folder / "save_dp2")},
        {
            "name": "tp2_two",
            "model": path,
            "tokens": sp2,
            "count": 2,
            "refused_save": str(folder / "refused_tp2"),
            "save": str(folder / "save_tp2"),
        },
        {"name": "dp2_from_tp2", "model": path, "first": 2, "count": 2, "load": str(folder / "save_tp2")},
        {"name": "tp2_from_dp2", "model": path, "tokens": tp2, "first": 2, "count": 2, "load": str(folder / "save_dp2")},
        {"name": "tp2_converted", "model": path, "tokens": tp2, "load": str(folder / "converted"), "count": 0},
        {"name": "dp2_nan", "model": path, "nan_at": 5},
        {"name": "dp2_death", "model": path, "dies": 1},  # the last: its rank 1 is gone
    ]
    if (folder / FULL).is_mount():
        one.append({"name": "disk_full", "model": path, "save": str(folder / FULL / "state")})
    return {1: one, 2: two}


def convert_moved(model: Path, folder: Path) -> None:
    """FOLDER/moved: the model with other weights; FOLDER/converted: the same as a Megatron checkpoint, written by one process."""
    from safetensors.torch import load_file, save_file

    from vime.backends.megatron_utils.convert.checkpoint import hf_to_megatron

    shutil.copytree(model, folder / "moved")
    weights = {name: tensor + 0.01 for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(weights, str(folder / "moved" / "model.safetensors"))
    hf_to_megatron(folder / "moved", folder / "converted")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A disk of 100 kB at `folder`, smaller than a trainer's state, where this user may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder)]
    mounted = shutil.which("mount") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def free_ports(count: int) -> list[str]:
    """Free ports below the range from which the system takes ports for outgoing connections, so that they stay free."""
    rng, out = random.SystemRandom(), []
    while len(out) < count:
        port = rng.randrange(15_000, 30_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            out.append(str(port))
    return out


def run_all(folder: Path, cases: dict[int, list[dict[str, Any]]]) -> None:
    """Start all ranks of both sizes side by side and wait for them; fail with their logs."""
    processes = []
    for world, listed in cases.items():
        (folder / f"cases_{world}.json").write_text(json.dumps(listed))
        ports = free_ports(len(listed))
        for rank in range(world):
            log = folder / f"log_{world}_{rank}.txt"
            path = os.pathsep.join(filter(None, [str(WORKER.parents[3]), os.environ.get("PYTHONPATH")]))
            env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
            with log.open("w") as out:
                processes.append((log, subprocess.Popen(
                    [sys.executable, str(WORKER), str(folder), str(world), str(rank), *ports],
                    stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True,
                )))  # fmt: skip
    try:
        for log, process in processes:
            if process.wait(timeout=DEADLINE_S) != 0:
                pytest.fail(f"{log.name}: exit {process.returncode}\n{log.read_text()[-4000:]}")
    finally:
        for _, process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """family -> folder."""
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, models: dict[str, str]) -> Path:
    """Where all cases left their results."""
    folder = tmp_path_factory.mktemp("layouts")
    convert_moved(Path(models["qwen3"]), folder)
    with small_disk(folder / FULL):
        run_all(folder, cases_of(models, folder))
    return folder


@pytest.fixture(scope="session")
def results(run_folder: Path) -> Results:
    """results(case, rank=0): what a rank of a case stored."""

    def load(name: str, rank: int = 0) -> dict[str, Any]:
        return torch.load(run_folder / f"{name}.{rank}.pt", weights_only=False)

    return load
