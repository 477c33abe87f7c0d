"""The rollout against a real engine behind the real router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.rollout.plugins import HERE
from tests.unit.rollout.support import make_args
from vime.backends.megatron_utils.log_probs import token_log_probs
from vime.backends.vllm_utils.router import RouterServer
from vime.errors import EngineError, GenerationError
from vime.packing.pack import KeptTokens
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.engine_access import EngineAccess
from vime.rollout.vllm_rollout import GenerateState, generate, generate_rollout
from vime.utils.types import Sample

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

Status = Sample.Status


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Twelve sums as chats."""
    file = tmp_path / "prompts.jsonl"
    rows = [{"input": [{"role": "user", "content": f"{n}+{n}="}], "label": str(2 * n)} for n in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def rolled(router: RouterServer, tiny_model: Path, prompts: Path) -> Any:
    """A function that runs one rollout step with some flags; gives (output, data source)."""

    def work(evaluation: bool = False, port: int | None = None, **flags: Any) -> tuple[Any, RolloutDataSourceWithBuffer]:
        chosen = {
            "hf_checkpoint": str(tiny_model),
            "prompt_data": str(prompts),
            "label_key": "label",
            "apply_chat_template": True,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 3,
            "rollout_max_response_len": 6,
            "rollout_max_context_len": 64,
            "custom_rm_path": f"{HERE}.parity_reward",
        } | flags
        args = make_args({"vllm_router_ip": router.host, "vllm_router_port": port or router.port}, **chosen)
        source = RolloutDataSourceWithBuffer(args)
        try:
            return generate_rollout(args, 0, source, evaluation), source
        finally:
            source.close()

    return work


def samples_of(output: Any) -> list[Sample]:
    """All samples, in order."""
    return [sample for group in output.samples for sample in group]


def test_samples_hold_the_prompt_what_was_sampled_and_under_which_weights(rolled: Any) -> None:
    output, source = rolled()
    tokenizer = source.resources.tokenizer
    assert [sample.index for sample in samples_of(output)] == list(range(12))
    versions = {version for sample in samples_of(output) for version in sample.weight_versions}
    assert len(versions) == 1
    assert "" not in versions
    for sample in samples_of(output):
        prompt = tokenizer.encode(sample.prompt, add_special_tokens=False)
        assert sample.tokens[: len(prompt)] == prompt
        assert 1 <= sample.response_length == len(sample.tokens) - len(prompt) <= 6
        assert sample.response == tokenizer.decode(sample.tokens[len(prompt) :])
        assert len(sample.rollout_log_probs or []) == len(sample.weight_versions) == sample.response_length
        assert all(value < 0 for value in sample.rollout_log_probs or [])
        ended = sample.tokens[-1] == tokenizer.eos_token_id
        assert sample.status is (Status.COMPLETED if ended else Status.TRUNCATED)
    assert output.metrics["rollout/total_tokens"] == sum(sample.response_length for sample in samples_of(output))


def test_members_of_a_group_differ_and_the_same_seed_samples_the_same_again(rolled: Any) -> None:
    flags = {"vllm_enable_deterministic_inference": True, "vllm_server_concurrency": 1}
    first, second, other = (samples_of(rolled(**flags, rollout_seed=seed)[0]) for seed in (1, 1, 2))
    assert [sample.tokens for sample in first] == [sample.tokens for sample in second]
    assert first[0].rollout_log_probs == pytest.approx(second[0].rollout_log_probs, abs=1e-5)
    assert [sample.tokens for sample in first] != [sample.tokens for sample in other]
    assert len({tuple(sample.tokens) for sample in first[:3]}) == 3


def test_greedy_evaluation_gives_every_copy_of_a_prompt_the_same_answer(rolled: Any, prompts: Path) -> None:
    flags = {"eval_prompt_data": ["sums", f"{prompts}@[0:4]"], "eval_temperature": 0.0, "n_samples_per_eval_prompt": 2}
    output, _ = rolled(evaluation=True, **flags)
    samples = output.data["sums"]["samples"]
    assert len(samples) == 8
    assert all(one.tokens == two.tokens for one, two in zip(samples[::2], samples[1::2], strict=True))
    assert output.metrics["eval/sums"] == 0.5


def test_a_plug_in_with_two_turns_keeps_the_engines_tokens_and_masks_the_tools(rolled: Any) -> None:
    output, _ = rolled(custom_generate_function_path=f"{HERE}.two_turns", rollout_max_response_len=20)
    for sample in samples_of(output):
        assert sample.loss_mask is not None
        assert len(sample.loss_mask) == sample.response_length
        assert sample.loss_mask.count(0) == len(" tool:4 ")
        assert all((version == "") == (flag == 0) for version, flag in zip(sample.weight_versions, sample.loss_mask, strict=True))


def test_a_plug_in_that_posts_to_the_router_itself_works(rolled: Any) -> None:
    output, _ = rolled(custom_generate_function_path=f"{HERE}.posts_itself")
    assert all(sample.metadata["same_state"] and sample.response_length for sample in samples_of(output))


def test_a_stop_string_ends_a_response_with_its_tokens_kept(rolled: Any) -> None:
    letters = {chr(code) for code in range(97, 123)}
    output, source = rolled(rollout_stop=sorted(letters), rollout_max_response_len=40)

    def letters_of(ids: list[int]) -> set[str]:  # the engine looks for stop strings in the text without special tokens
        return letters & set(source.resources.tokenizer.decode(ids, skip_special_tokens=True))

    responses = [sample.tokens[-sample.response_length :] for sample in samples_of(output)]
    assert all(not letters_of(ids[:-1]) for ids in responses)  # a token may hold several characters: the last one ends it
    stopped = [sample for sample, ids in zip(samples_of(output), responses, strict=True) if letters_of(ids)]
    assert stopped
    assert all(sample.status is Status.COMPLETED for sample in stopped)


def test_log_probs_are_over_what_top_k_and_top_p_left_as_transformers_says(rolled: Any, tiny_model: Path) -> None:
    """The trainer's function, given the kept tokens, computes the engine's log-probs to 1e-4."""
    from transformers import AutoModelForCausalLM

    output, _ = rolled(rollout_top_k=5, rollout_top_p=0.5, rollout_temperature=0.7)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    sizes = []
    for sample in samples_of(output):
        kept = KeptTokens(ids=torch.tensor(sample.rollout_top_p_token_ids), offsets=torch.tensor(sample.rollout_top_p_token_offsets))
        sizes += kept.offsets.diff().tolist()
        tokens = torch.tensor(sample.tokens)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, -sample.response_length - 1 : -1]
        expected, _ = token_log_probs(logits, tokens[-sample.response_length :], temperature=0.7, kept=kept)
        assert sample.rollout_log_probs == pytest.approx(expected.tolist(), abs=1e-4)
    assert 1 <= min(sizes) < max(sizes) <= 5
    assert output.metrics["rollout/top_p_kept_vocab_per_token"] == pytest.approx(sum(sizes) / len(sizes))


def test_a_request_that_the_engine_refuses_ends_in_the_engines_own_words(rolled: Any) -> None:
    with pytest.raises(GenerationError, match=r"groups in a row could not be had.*HTTP 400.*temperature"):
        rolled(custom_generate_function_path=f"{__name__}.impossible")


def test_no_router_is_an_error_that_names_its_address(rolled: Any) -> None:
    with pytest.raises(GenerationError, match=r"127\.0\.0\.1:9/inference/v1/generate failed 1 times"):
        rolled(port=9, rollout_request_retries=0)


async def impossible(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Asks for what no engine grants."""
    state = GenerateState(args)
    ids = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    try:
        await state.client.generate(ids, {**sampling_params, "temperature": -1.0})
    except EngineError as error:
        raise GenerationError(str(error)) from error
    return sample


def test_a_teacher_server_gives_its_log_probs_of_what_was_sampled(rolled: Any, engine: Any) -> None:
    """Here the student's own engine teaches: the same numbers as it sampled with."""
    output, _ = rolled(use_opd=True, opd_type="vllm", opd_teacher_url=engine.endpoint.url)
    for sample in samples_of(output):
        assert sample.teacher_log_probs == pytest.approx(sample.rollout_log_probs, abs=1e-4)


async def long_for_one_group(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Group 1 has long responses."""
    longer = {"max_new_tokens": 400, "ignore_eos": True} if sample.group_index == 1 else {}
    return await generate(args, sample, sampling_params | longer)


def test_a_response_that_was_cut_off_goes_on_from_its_tokens(router: RouterServer, engine: Any, tiny_model: Path, prompts: Path) -> None:
    """The engine's log-probs on both sides of the cut are transformers' of the whole text, to 1e-4."""
    from transformers import AutoModelForCausalLM

    flags = {"over_sampling_batch_size": 3, "partial_rollout": True, "rollout_batch_size": 2, "rollout_max_context_len": 500}
    paths = {"custom_generate_function_path": f"{__name__}.long_for_one_group", "custom_rm_path": f"{HERE}.parity_reward"}
    data = {"hf_checkpoint": str(tiny_model), "prompt_data": str(prompts), "label_key": "label", "apply_chat_template": True}
    runtime = {"vllm_router_ip": router.host, "vllm_router_port": router.port, "engine_access": EngineAccess(engine.control.abort)}
    args = make_args(runtime, n_samples_per_prompt=2, rollout_max_response_len=4, **flags, **paths, **data)
    for _ in range(5):  # the long group may be finished before the others on a machine that is busy elsewhere
        source = RolloutDataSourceWithBuffer(args)
        try:
            generate_rollout(args, 0, source)
            (waiting,) = source.buffer
            before = [list(sample.tokens) for sample in waiting]
            lengths = [sample.response_length for sample in waiting]
            again = generate_rollout(args, 1, source)
            while source.buffer and source.buffer[0][0].group_index == 1:
                again = generate_rollout(args, 2, source)
        finally:
            source.close()
        if waiting[0].group_index == 1 and 0 < min(lengths) < 400:
            break
    assert waiting[0].group_index == 1
    group = next(group for group in again.samples if group[0].group_index == 1)
    assert [sample.response_length for sample in group] == [400, 400]
    assert [sample.tokens[: len(old)] for sample, old in zip(group, before, strict=True)] == before
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for sample in group:
        tokens = torch.tensor(sample.tokens)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, -sample.response_length - 1 : -1]
        expected = torch.log_softmax(logits.float(), -1).gather(1, tokens[-sample.response_length :, None])[:, 0]
        assert sample.rollout_log_probs == pytest.approx(expected.tolist(), abs=1e-4)
