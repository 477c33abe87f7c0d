"""More than one trainer and more than one engine; a cluster of one's own and a cluster that was there before."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from whole_runs import Run, metrics

from vime.cli.main import main

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def steps(folder):
    return [line for line in metrics(folder) if line["source"] == "step"]


def assert_agreement(folder, count):
    lines = steps(folder)
    assert [line["step"] for line in lines] == list(range(count))
    assert all(line["train/train_rollout_logprob_abs_diff"] <= 1e-4 for line in lines)


def test_tensor_parallel_trainers_feed_two_engines_with_a_reference_model(flags, assets, tmp_path):
    changes = {"actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2, "rollout_num_gpus": 2, "num_rollout": 2}
    reference = {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k3", "ref_load": assets["model"]}
    run = Run(flags(**changes, **reference, vllm_enable_deterministic_inference=False), tmp_path / "out.txt")
    assert run.wait() == 0, run.output[-3000:]
    run.assert_nothing_left()
    assert_agreement(tmp_path / "run", 2)
    assert abs(steps(tmp_path / "run")[0]["train/kl_loss"]) < 1e-6  # the policy begins as its reference


def test_pipeline_trainers_agree_with_their_engine_and_a_recorded_step_comes_out_the_same_again(flags, tmp_path, capsys):
    """The loss, and what the proof compares with, are in the last stage; the weights come from both."""
    records = {"capsule_steps": 1, "dump_details": tmp_path / "details"}
    run = Run(flags(actor_num_gpus_per_node=2, pipeline_model_parallel_size=2, num_rollout=2, **records), tmp_path / "out.txt")
    assert run.wait() == 0, run.output[-3000:]
    run.assert_nothing_left()
    assert_agreement(tmp_path / "run", 2)
    assert sorted(file.name for file in (tmp_path / "details" / "train_data").iterdir()) == ["0.pt", "1.pt"]
    assert sorted(file.name for file in (tmp_path / "details" / "rollout_data").iterdir()) == ["0.jsonl", "1.jsonl"]
    assert main(["replay", str(tmp_path / "run" / "capsules" / "step_0000001")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "the recorded layout: bit for bit"
    assert lines[-1] == "the same"


@pytest.fixture
def cluster(tmp_path):
    """A Ray cluster that somebody else started."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1"]
    command += ["--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000"]
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a token that this cluster and its users share"}
    log = tmp_path / "ray.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **env})
    end = time.monotonic() + 120
    while "Ray runtime started" not in log.read_text(errors="replace"):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)  # another process starts
    yield {"RAY_ADDRESS": f"127.0.0.1:{port}", **env}, process
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(60)


def test_data_parallel_trainers_in_a_cluster_that_was_there_before(flags, tmp_path, cluster):
    env, process = cluster
    run = Run(flags(actor_num_gpus_per_node=2, num_rollout=2), tmp_path / "out.txt", env=env)
    assert run.wait() == 0, run.output[-3000:]
    assert_agreement(tmp_path / "run", 2)
    assert process.poll() is None  # the cluster is not ours to end
    run.assert_nothing_left(ports=False)
