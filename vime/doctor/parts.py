"""The parts of the self-test, each a process of its own that uses the framework's real code.

    python -m vime.doctor.parts PART FOLDER

Each step that is done is one line of JSON on stdout: {"name", "found", "seconds"}. A step that fails ends the process with
{"failed"} and the traceback on stderr. FOLDER holds the model (part `model` makes it) and takes logs and results.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vime.config import RunConfig
from vime.config import sections as s
from vime.errors import EngineError, TrainerError, VimeError

__all__ = ["ENGINE_SECONDS", "PARTS", "TOKENS", "main"]

TOKENS = [5, 17, 60, 33, 91, 12, 44, 101, 8, 70, 29, 3]  # whose log-probs engine and trainer both compute
ENGINE_SECONDS = 280.0  # until the engine must serve
STEP_SECONDS = 60.0
SEGMENT_BYTES = 8 * 2**20
LEARNING_RATE = 1e-3


@contextmanager
def step(name: str) -> Iterator[list[str]]:
    """Time a step; what is appended to the list is told as what was found."""
    told: list[str] = []
    begun = time.monotonic()
    yield told
    print(json.dumps({"name": name, "found": "; ".join(told), "seconds": round(time.monotonic() - begun, 2)}), flush=True)


def make_model(folder: Path) -> None:
    """The tiny model."""
    from vime.doctor.tiny_model import write_tiny_model

    with step("tiny model") as told:
        path = write_tiny_model(folder / "model")
        told.append(f"{(path / 'model.safetensors').stat().st_size / 1024:.0f} KiB of weights")


def shared_memory(folder: Path) -> None:
    """A segment that one process fills and another one reads, as weights travel."""
    from vime.backends.weight_transfer.segment import Segment

    with step("shared-memory segment") as told:
        content = os.urandom(4096) * (SEGMENT_BYTES // 4096)
        segment = Segment.create("doctor", SEGMENT_BYTES)
        try:
            segment.memory[:SEGMENT_BYTES] = content
            code = (
                "import hashlib, sys; from vime.backends.weight_transfer.segment import Segment\n"
                f"print(hashlib.sha256(Segment.attach(sys.argv[1]).memory[:{SEGMENT_BYTES}]).hexdigest())"
            )
            command = [sys.executable, "-c", code, segment.name]
            found = subprocess.run(command, capture_output=True, text=True, timeout=STEP_SECONDS, check=True).stdout.strip()
        finally:
            segment.close()
        if found != hashlib.sha256(content).hexdigest():
            raise VimeError("another process read other bytes from shared memory than were written.")
        told.append(f"{SEGMENT_BYTES // 2**20} MiB written here and read in another process")


def gloo(folder: Path, rank: int = 0) -> None:
    """Two processes add their numbers up."""
    if rank == 0:
        with step("gloo all-reduce") as told:
            peer = subprocess.Popen([sys.executable, "-m", __spec__.name, "gloo-peer", str(folder)], stderr=subprocess.PIPE, text=True)
            try:
                _all_reduce(folder, rank)
                _, error = peer.communicate(timeout=STEP_SECONDS)
            finally:
                peer.kill()
            if peer.returncode != 0:
                raise TrainerError(f"the second process of the all-reduce failed: {error[-1000:]}")
            told.append("two processes agree")
    else:
        _all_reduce(folder, rank)


def _all_reduce(folder: Path, rank: int) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    store = f"file://{folder / 'gloo_store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=STEP_SECONDS))
    total = torch.full((1024,), float(rank + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    if not bool((total == 3.0).all()):
        raise TrainerError(f"the all-reduce of 1 and 2 over two processes is {float(total[0])}.")


def ray_cluster(folder: Path) -> None:
    """A local cluster starts, runs an actor of ours, and ends."""
    from vime.ray.cluster import Cluster
    from vime.ray.process import WatchedActor, watched_actor
    from vime.ray.supervisor import Supervisor

    with step("Ray cluster") as told, Cluster(RunConfig()):
        actor = watched_actor(WatchedActor).options(num_cpus=0).remote(str(folder / "actor.log"))
        (pid,) = Supervisor().get([actor.pid.remote()], names=["the self-test's actor"], phase="start", deadline=STEP_SECONDS)
        told.append(f"an actor answered (process {pid})")


def config_of(folder: Path) -> RunConfig:
    """A run on the tiny model, as far as one trainer and one engine look at it."""
    from vime.doctor.tiny_model import CONTEXT

    return RunConfig(
        model=s.ModelConfig(hf_checkpoint=str(folder / "model")),
        rollout=s.RolloutConfig(rollout_max_context_len=CONTEXT),
        training=s.TrainingConfig(lr=LEARNING_RATE, train_threads=1),
        data=s.DataConfig(num_rollout=1, rollout_batch_size=1, n_samples_per_prompt=2),
        cluster=s.ClusterConfig(actor_deadline=STEP_SECONDS),
    )


def trainer(folder: Path) -> None:
    """Megatron loads the model, computes log-probs, and takes one GRPO step: forward, backward, optimizer."""
    config = config_of(folder)
    with step("trainer: Megatron") as told:
        from vime.backends.megatron_utils.actor import MegatronTrainer
        from vime.backends.vllm_utils.process import PortClaim

        claim = PortClaim(None, what="the self-test's trainer")
        made = MegatronTrainer(config, rank=0, world_size=1, master_addr="127.0.0.1", master_port=claim.port)
        claim.close()
        before = made.log_probs(TOKENS)
        (folder / "trainer.json").write_text(json.dumps(before))
        told.append(f"{made.num_parameters} parameters loaded")
    with step("trainer: forward, backward, step") as told:
        metrics = made.train(_batch(config))
        after = made.log_probs(TOKENS)
        if after == before:
            raise TrainerError("an optimizer step left the weights as they were.")
        told.append(f"gradient norm {metrics['train/grad_norm']:.3g}, log-probs move")
        made.shutdown()


def _batch(config: RunConfig) -> Any:
    """One group of two answers, one right and one wrong."""
    from vime.packing.build import build_train_batches
    from vime.utils.types import Sample

    samples = []
    for index in range(2):
        tokens = [*TOKENS[:6], *TOKENS[6 + index : 10 + index]]
        sample = Sample(group_index=0, index=index, tokens=tokens, response_length=4, reward=float(index), status=Sample.Status.COMPLETED)
        sample.rollout_log_probs = [-1.0] * 4
        samples.append(sample)
    (batch,) = build_train_batches(
        samples, rollout_id=0, data=config.data, algorithm=config.algorithm, reward=config.reward, dp_size=1, args=config.args
    )
    return batch


def engine(folder: Path) -> None:
    """vLLM serves the model and gives log-probs; the router passes on; both agree with the configuration."""
    from vime.backends.vllm_utils.handshake import shake_hands
    from vime.backends.vllm_utils.router import RouterServer
    from vime.backends.vllm_utils.server import EngineServer
    from vime.backends.weight_transfer.control import EngineControl

    config = config_of(folder)
    request = {"token_ids": TOKENS, "sampling_params": {"max_tokens": 1, "temperature": 1.0, "logprobs": 0, "seed": 7, "detokenize": False}}
    with step("engine: vLLM") as told:
        server = EngineServer(config, index=0, log_path=folder / "engine.log", run_id="doctor")
        try:
            server.wait_healthy(ENGINE_SECONDS)
            own = server.control.call("POST", "/inference/v1/generate", request, seconds=STEP_SECONDS)["choices"][0]
            log_probs, _ = server.control.prompt_log_probs(TOKENS, seconds=STEP_SECONDS)
            (folder / "engine.json").write_text(json.dumps(log_probs))
            told.append(f"serves, generated token {own['token_ids'][0]}")
        except BaseException:
            server.stop()
            raise
    try:
        with step("router") as told:
            router = RouterServer([server.endpoint.url], log_path=folder / "router.log")
            try:
                router.wait_ready(STEP_SECONDS)
                (facts,) = shake_hands(config, [server.endpoint], router)
                passed = EngineControl(router.url, "", name="the router").call("POST", "/inference/v1/generate", request)["choices"][0]
                if passed["token_ids"] != own["token_ids"]:
                    raise EngineError(f"through the router the engine generated {passed['token_ids']}, directly {own['token_ids']}.")
                told.append(f"passes on the same token; engine and configuration agree ({facts.dtype}, {facts.max_model_len} tokens)")
            finally:
                router.stop()
    finally:
        server.stop()


PARTS: dict[str, Callable[[Path], None]] = {
    "model": make_model,
    "engine": engine,
    "trainer": trainer,
    "ray": ray_cluster,
    "gloo": gloo,
    "shm": shared_memory,
}


def main(argv: list[str]) -> int:
    """Run one part; 1 when it fails, with the reason as a line of JSON and the traceback on stderr."""
    name, folder = argv[0], Path(argv[1])
    if name == "gloo-peer":
        gloo(folder, rank=1)
        return 0
    try:
        PARTS[name](folder)
    except Exception as error:  # noqa: BLE001 - whatever fails is what the doctor tells
        traceback.print_exc()
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
