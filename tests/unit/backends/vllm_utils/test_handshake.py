"""What the handshake calls a disagreement: pure comparisons; the real engine and router are in tests/integration/vllm."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from vime.backends.vllm_utils.handshake import FRESH_WEIGHTS, EngineFacts, engine_disagreements
from vime.config import RunConfig
from vime.config import sections as s
from vime.errors import CheckpointError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"vocab_size": 128}')
    return tmp_path


def config_of(model: Path, **changes: Any) -> RunConfig:
    parts = {"model": s.ModelConfig(hf_checkpoint=str(model)), "rollout": s.RolloutConfig(rollout_max_context_len=512)}
    return RunConfig(**(parts | changes))


def facts_of(folder: Path, number: int = 0, **changes: Any) -> EngineFacts:
    """An engine that agrees with `config_of`."""
    facts = EngineFacts(
        name=f"engine {number}",
        url=f"http://127.0.0.1:{8000 + number}",
        vllm="0.32.0",
        model=str(folder),
        served_name="vime",
        dtype="float32",
        vocab_size=128,
        max_model_len=512,
        world_size=1,
        tensor_parallel_size=1,
        weight_version=FRESH_WEIGHTS,
        paused=False,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        transport="shm",
        max_requests=None,
        max_logprobs=20,
    )
    return dataclasses.replace(facts, **changes)


def test_engines_that_agree_are_no_problem(model: Path) -> None:
    assert list(engine_disagreements(config_of(model), [facts_of(model), facts_of(model, 1)])) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "/other"}, ("model is '/other'", "--hf-checkpoint is '", "Start it with that model")),
        ({"vocab_size": 99}, ("vocab size is 99", "config.json says 128")),
        ({"dtype": "bfloat16"}, ("dtype is 'bfloat16'", "--device cpu computes in 'float32'", "--dtype float32")),
        ({"max_model_len": 256}, ("max model len is 256", "--rollout-max-context-len is 512")),
        ({"tensor_parallel_size": 2}, ("tensor parallel size is 2", "--rollout-num-gpus-per-engine is 1")),
        ({"world_size": 4}, ("world size is 4", "pipeline and data parallelism")),
        ({"weight_version": "7"}, ("weight version is '7'", "has sent no weights yet", "Another run controls it")),
        ({"paused": True}, ("'paused' is True", "Another run controls it")),
        ({"logprobs_mode": "raw_logprobs"}, ("logprobs mode is 'raw_logprobs'", "--vllm-logprobs-mode")),
        ({"generation_config": "auto"}, ("generation config is 'auto'", "--vllm-generation-config")),
        ({"transport": "nccl"}, ("transport is 'nccl'", "the trainer sends over 'shm'")),
        ({"max_requests": 100}, ("refuses more than 100 requests", "--vllm-server-concurrency is 512")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_engine_that_differs_from_the_configuration_is_named_with_both_sides(
    model: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    problems = list(engine_disagreements(config_of(model), [facts_of(model), facts_of(model, 1, **changes)]))
    assert len(problems) == 1, problems
    assert problems[0].startswith("engine 1 at http://127.0.0.1:8001")
    for word in words:
        assert word in problems[0]


def test_engines_that_differ_from_one_another_are_both_named(model: Path) -> None:
    problems = list(engine_disagreements(config_of(model), [facts_of(model), facts_of(model, 1, vllm="0.26.0")]))
    assert len(problems) == 1
    assert "the version of vLLM of engine 1 at http://127.0.0.1:8001 is '0.26.0', that of engine 0 at" in problems[0]


def test_what_the_configuration_leaves_to_the_engine_must_be_alike_in_all(model: Path) -> None:
    free = config_of(model, rollout=s.RolloutConfig(rollout_max_response_len=64))
    assert list(engine_disagreements(free, [facts_of(model, max_model_len=300)])) == []
    problems = list(engine_disagreements(free, [facts_of(model), facts_of(model, 1, max_model_len=300)]))
    assert len(problems) == 1
    assert "max model len of engine 1" in problems[0]


def test_responses_longer_than_the_engine_takes_are_refused(model: Path) -> None:
    config = config_of(model, rollout=s.RolloutConfig(rollout_max_response_len=512))
    (problem,) = engine_disagreements(config, [facts_of(model)])
    assert "takes 512 tokens in all" in problem
    assert "--rollout-max-context-len 512" in problem


@pytest.mark.parametrize(("top_k", "most", "fits"), [(50, 20, False), (50, 50, True), (-1, 20, True), (50, -1, True)])
def test_all_that_a_token_was_chosen_from_must_be_told(model: Path, top_k: int, most: int, fits: bool) -> None:
    config = config_of(model, rollout=s.RolloutConfig(rollout_max_context_len=512, rollout_top_k=top_k))
    problems = list(engine_disagreements(config, [facts_of(model, max_logprobs=most)]))
    assert (problems == []) is fits
    assert all(f"log-probs of {most} tokens at most, --rollout-top-k is {top_k}" in problem for problem in problems)


@pytest.mark.parametrize("tokens", [("--dtype", "bfloat16"), ("--dtype=bfloat16",), ("--dtype", "half", "--dtype", "bfloat16")])
def test_a_dtype_of_the_users_is_what_is_expected(model: Path, tokens: tuple[str, ...]) -> None:
    config = config_of(model, vllm_tokens=tokens)
    assert list(engine_disagreements(config, [facts_of(model, dtype="bfloat16")])) == []
    (problem,) = engine_disagreements(config, [facts_of(model)])
    assert "--vllm-dtype is 'bfloat16'" in problem


def test_the_text_part_tells_the_vocabulary_of_a_model_with_several_modalities(model: Path) -> None:
    (model / "config.json").write_text('{"text_config": {"vocab_size": 128}}')
    assert list(engine_disagreements(config_of(model), [facts_of(model)])) == []


def test_a_model_folder_without_a_vocabulary_is_named(model: Path) -> None:
    (model / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json does not tell the vocabulary.s size"):
        list(engine_disagreements(config_of(model), [facts_of(model)]))
