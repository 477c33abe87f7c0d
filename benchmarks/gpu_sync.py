"""Trainer and engine on one CUDA device: weight sync by CUDA IPC phase by phase, sleep and wake, and the trainer's memory given back.

    python -m benchmarks.gpu_sync [--shape 0.6b|4b] [--rounds N] [--bucket BYTES] [--out FILE]

Random weights of a Qwen3 shape, written as a folder that the engine starts from; the engine is eager, for a start without compiling.
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_step import COMMON, SHAPES, RandomTrainer, batch_of, seconds_of
from examples.quickstart.make_assets import _make_tokenizer
from vime.backends.megatron_utils.update_weight.sync import WeightUpdater
from vime.backends.vllm_utils.server import EngineServer
from vime.config import sections as s
from vime.config.run import RunConfig

PROBE = list(range(1000, 1032))
ASIDE = ("--enforce-eager", "--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(8 * 2**30))


def config_of(folder: str) -> RunConfig:
    return RunConfig(
        cluster=s.ClusterConfig(device="cuda", colocate=True),
        model=s.ModelConfig(hf_checkpoint=folder),
        training=s.TrainingConfig(lr=1e-6),
        data=s.DataConfig(num_rollout=1, rollout_batch_size=1),
        algorithm=s.AlgorithmConfig(advantage_estimator="grpo"),
        rollout=s.RolloutConfig(rollout_max_context_len=4096, rollout_max_response_len=64),
        megatron_tokens=("--lr-decay-style", "constant"),
        vllm_tokens=ASIDE,
    )


def timed(work: Callable[[], Any]) -> float:
    return seconds_of(work, 1)[0]


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one JSON object."""
    out: dict[str, Any] = {"shape": given.shape, "device": torch.cuda.get_device_name(), "torch": torch.__version__, "bucket": given.bucket}
    with tempfile.TemporaryDirectory() as base, socket.socket() as probe:
        start = Path(base) / "shape"
        start.mkdir()
        (start / "config.json").write_text(json.dumps(COMMON | SHAPES[given.shape]))
        _make_tokenizer().save_pretrained(start)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        trainer = RandomTrainer(config_of(str(start)), rank=0, world_size=1, master_addr="127.0.0.1", master_port=port)
        folder = str(Path(base) / "model")
        out["save_hf_seconds"] = timed(lambda: trainer.save_hf(folder))
        begun = time.perf_counter()
        engine = EngineServer(config_of(folder), index=0, log_path=Path(base) / "engine.log", run_id="bench")
        try:
            engine.wait_healthy(300.0)
            out["engine_start_seconds"] = time.perf_counter() - begun
            out |= _turns(trainer, engine, given)
        except Exception:
            print((Path(base) / "engine.log").read_text()[-6000:])
            raise
        finally:
            engine.stop()
        trainer.shutdown()
    return out


def _turns(trainer: RandomTrainer, engine: EngineServer, given: argparse.Namespace) -> dict[str, Any]:
    updater = WeightUpdater(s.WeightUpdateConfig(), run_id="bench", transport="ipc")
    batch = batch_of(4096, 1)
    trainer.train(batch)
    rounds = []
    for number in range(given.rounds):
        row: dict[str, Any] = {"sleep": timed(lambda: engine.control.sleep(2, seconds=120.0))}
        row["trainer_take_back"] = timed(trainer._offload.take_back)
        row["train"] = timed(lambda: trainer.train(batch))
        row["give_back_state"] = timed(lambda: trainer.give_back(weights=False))
        row["wake"] = timed(lambda: engine.control.wake_up(seconds=120.0))
        expected = trainer.log_probs(PROBE)
        row["gather"] = timed(lambda: sum(len(bucket) for bucket in trainer.hf_weights(given.bucket)))

        def update(version: int = number + 1, known: list[float] = expected) -> Any:
            return updater.update([engine.endpoint], version, trainer.hf_weights(given.bucket), PROBE, lambda _tokens: known)

        begun = time.perf_counter()
        report = update()
        row["sync"] = time.perf_counter() - begun
        row |= {"phases": report.phases, "bytes": report.num_bytes, "gb_per_s": report.gigabytes_per_second}
        row["proof_max_abs_diff"] = report.proof_max_abs_diff
        row["give_back_weights"] = timed(lambda: trainer.give_back(weights=True))
        row["device_free_bytes"] = torch.cuda.mem_get_info()[0]
        rounds.append(row)
        print(json.dumps(row), flush=True)
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copies = seconds_of(lambda: target.copy_(source), 6)[1:]
    return {"rounds": rounds, "device_copy_gb_per_s": 2**30 / min(copies) / 1e9}


def main() -> None:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="4b")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--bucket", type=int, default=512 * 2**20)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    text = json.dumps(measure(given), indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
