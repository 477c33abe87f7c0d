"""One of two engines dies while a step is generated: its requests go to the other, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import START_SECONDS, engine_config
from tests.unit.rollout.support import make_args
from vime.backends.vllm_utils.router import RouterServer
from vime.backends.vllm_utils.server import EngineServer
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.vllm_rollout import generate, generate_rollout
from vime.utils.types import Sample

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

THE_KILLER = 4  # index of the sample


@pytest.fixture(scope="module")
def doomed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """A second engine, to be killed."""
    log = tmp_path_factory.mktemp("doomed") / "engine_1.log"
    server = EngineServer(engine_config(tiny_model), index=1, log_path=log, run_id="tests")
    try:
        server.wait_healthy(START_SECONDS)
        yield server
    finally:
        server.stop()


async def generate_and_kill(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One sample is short and then kills the engine that its row names, while the others are half way through theirs."""
    if sample.index == THE_KILLER:
        sample = await generate(args, sample, {**sampling_params, "max_new_tokens": 2})
        os.kill(sample.metadata["victim"], signal.SIGKILL)
        return sample
    return await generate(args, sample, sampling_params)


def test_the_requests_of_a_dead_engine_are_answered_by_the_other(
    engine: EngineServer, doomed: EngineServer, tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"input": f"count to {n}: ", "metadata": {"victim": doomed.pid}} for n in range(16)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    router = RouterServer([engine.endpoint.url, doomed.endpoint.url], log_path=tmp_path / "router.log")
    try:
        router.wait_ready(60.0)
        args = make_args(
            {"vllm_router_ip": router.host, "vllm_router_port": router.port, "num_engines": 2},
            hf_checkpoint=str(tiny_model),
            prompt_data=str(file),
            rollout_batch_size=16,
            n_samples_per_prompt=2,
            rollout_max_response_len=100,
            vllm_server_concurrency=8,
            rm_type="random",
            custom_generate_function_path=f"{__name__}.generate_and_kill",
        )
        output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    finally:
        router.stop()
    assert doomed.poll() is not None
    assert output.metrics["rollout/failed_samples"] == 0.0
    assert output.metrics["rollout/failed_groups"] == 0.0
    assert [sample.index for group in output.samples for sample in group] == list(range(32))
    assert all(sample.response_length == len(sample.rollout_log_probs) > 0 for group in output.samples for sample in group)
