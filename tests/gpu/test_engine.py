"""A real engine on the trainer's GPU: weights by CUDA IPC with the proof, turns, and memory given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.conftest import run_config, samples, train_batch
from vime.backends.megatron_utils.update_weight.sync import WeightUpdater
from vime.backends.vllm_utils.server import EngineServer
from vime.config import sections as s
from vime.errors import WeightSyncError

PROBE = [int(token) for token in samples([(0, 32)], seed=9)[0].tokens]
GIB = 2**30


@pytest.fixture(scope="module")
def engine(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    config = run_config(
        model_folder,
        cluster=s.ClusterConfig(device="cuda", colocate=True),
        rollout=s.RolloutConfig(rollout_max_context_len=1024, rollout_max_response_len=64),
        vllm_tokens=("--max-cudagraph-capture-size", "8", "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(4 * GIB)),
    )
    server = EngineServer(config, index=0, log_path=tmp_path_factory.mktemp("engine") / "engine.log", run_id="gpu")
    try:
        server.wait_healthy(300.0)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def updater() -> WeightUpdater:
    return WeightUpdater(s.WeightUpdateConfig(update_weight_buffer_size=2**20), run_id="gpu", transport="ipc")


def sync(trainer: Any, engine: EngineServer, updater: WeightUpdater, version: int) -> Any:
    return updater.update([engine.endpoint], version, trainer.hf_weights(2**20), PROBE, trainer.log_probs)


def test_each_sync_reaches_the_engine_and_is_proven(trainer: Any, engine: EngineServer, updater: WeightUpdater) -> None:
    batch = train_batch(samples([(5, 40), (30, 90)], seed=11), ((0, 1),))
    for version in (1, 2, 3):
        report = sync(trainer, engine, updater, version)
        assert report.version == version
        assert report.num_bytes == 2 * trainer.num_parameters
        assert report.proof_max_abs_diff < 0.1
        assert engine.control.weight_version() == str(version)
        trainer.train(batch)  # the next version's weights differ


def test_a_reply_tells_its_version_and_log_probs_that_are_the_trainers(trainer: Any, engine: EngineServer, updater: WeightUpdater) -> None:
    sync(trainer, engine, updater, 4)
    params = {"max_tokens": 48, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False, "seed": 1}
    reply = engine.control.call("POST", "/inference/v1/generate", {"token_ids": PROBE, "sampling_params": params}, seconds=60.0)
    choice = reply["choices"][0]
    tokens = choice["token_ids"]
    assert choice["weight_versions"] == [{"version": "4", "start": 0, "end": 48}]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == tokens
    theirs = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
    ours = torch.tensor(trainer.log_probs([*PROBE, *tokens])[-48:])
    assert float((ours - theirs).abs().mean()) < 0.03  # both in bfloat16, with other kernels


def test_weights_that_are_not_the_trainers_are_refused(trainer: Any, engine: EngineServer, updater: WeightUpdater) -> None:
    def wrong(tokens: list[int]) -> list[float]:
        return [value - 1.0 for value in trainer.log_probs(tokens)]

    with pytest.raises(WeightSyncError, match="computes with other weights"):
        updater.update([engine.endpoint], 5, trainer.hf_weights(2**20), PROBE, wrong)
    assert sync(trainer, engine, updater, 6).version == 6


def test_an_engine_that_slept_without_its_weights_is_whole_after_the_next_sync(
    trainer: Any, engine: EngineServer, updater: WeightUpdater
) -> None:
    before = torch.cuda.mem_get_info()[0]
    engine.control.sleep(2, seconds=60.0)
    assert torch.cuda.mem_get_info()[0] - before > 3 * GIB  # its cache of 4 GiB, and its weights
    trainer.train(train_batch(samples([(5, 40)], seed=12), ((0,),)))
    engine.control.wake_up(seconds=60.0)
    assert sync(trainer, engine, updater, 7).proof_max_abs_diff < 0.1


def test_the_trainer_gives_its_memory_back_and_goes_on_with_the_same_weights(trainer: Any) -> None:
    def weights() -> torch.Tensor:
        return torch.cat([p.detach().flatten() for chunk in trainer._model for p in chunk.parameters()])

    batch = train_batch(samples([(5, 40)], seed=13), ((0,),))
    trainer.train(batch)
    kept, held = weights().clone().cpu(), torch.cuda.memory_allocated()
    trainer.give_back(weights=False)
    assert torch.cuda.memory_allocated() < held - 15 * trainer.num_parameters  # of 16 bytes: gradient, master weight, two moments
    assert torch.equal(weights().cpu(), kept)
    trainer.give_back(weights=True)
    trainer._offload.take_back()
    assert torch.equal(weights().cpu(), kept)
    assert torch.cuda.memory_allocated() >= held - 2**20
    trainer.train(batch)
