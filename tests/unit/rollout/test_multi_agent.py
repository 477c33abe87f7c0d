"""examples/multi_agent: each role's turn is a sample with its own prompt, mask and reward, and is compared with its own kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.multi_agent.roles import compare_by_role, log_roles
from tests.unit.rollout.support import make_args, reply_of, run, serving
from vime.algorithms.group_norm import normalize_group_rewards
from vime.config import sections as s
from vime.packing.convert import to_train_samples
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.vllm_rollout import generate_rollout_async
from vime.utils.types import Sample

ROLES = "examples.multi_agent.roles"
ENTRY = {"answer": "3", "metadata": {"expression": "1 + 2"}}


def rolled(model_dir: Path, folder: Path, tokenizer: Any) -> list[Any]:
    """One group of two executions: one begins with the right draft, the other with 9; checker and reviser know the answer."""
    row = {"input": "1+2=", "label": "3", "metadata": {"reasoning_gym": {"dataset": "basic_arithmetic", "entry": ENTRY}}}
    (folder / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    drafts = iter(["3", "9"])

    def answer(body: Any, n: int) -> Any:
        message = tokenizer.decode(body["token_ids"]).partition("user\n")[2].partition("<|im_end|>")[0]
        said = next(drafts) if message.endswith("=") else {"1+2=3?": "1", "1+2=9?": "0", "1+2=9!": "3"}[message]
        return reply_of(said, tokenizer)

    async def step() -> Any:
        async with serving(answer) as server:
            flags = {
                "hf_checkpoint": str(model_dir),
                "prompt_data": str(folder / "prompts.jsonl"),
                "label_key": "label",
                "metadata_key": "metadata",
                "rollout_batch_size": 1,
                "n_samples_per_prompt": 2,
                "rollout_max_response_len": 20,
                "rollout_skip_special_tokens": True,
                "custom_rm_path": "examples.quickstart.reward.verified",
                "custom_generate_function_path": f"{ROLES}.solve_check_revise",
            }
            args = make_args(server.runtime, **flags)
            return (await generate_rollout_async(args, 0, RolloutDataSourceWithBuffer(args), False)).samples[0]

    return run(step())


@pytest.fixture
def executions(model_dir: Path, tmp_path: Path, tokenizer: Any) -> list[list[Sample]]:
    """A right draft that is accepted, and a wrong one that is refused and mended; whichever execution is served first."""
    return sorted(rolled(model_dir, tmp_path, tokenizer), key=len)


def test_every_turn_has_its_own_prompt_reward_and_mask(executions: list[list[Sample]]) -> None:
    accepted, revised = executions
    assert [turn.metadata["role"] for turn in accepted] == ["solver", "checker"]
    assert [turn.metadata["role"] for turn in revised] == ["solver", "checker", "reviser"]
    assert [turn.reward for turn in accepted] == [1.0, 1.0]
    assert [turn.reward for turn in revised] == [0.0, 1.0, 1.0]
    for turns in executions:
        assert len({turn.rollout_id for turn in turns}) == 1
        assert len({turn.prompt for turn in turns}) == len(turns)
        checker = turns[1]
        assert checker.loss_mask == [1] + [0] * (checker.response_length - 1)
        assert all(turn.loss_mask == [1] * turn.response_length for turn in turns if turn is not checker)
    assert revised[2].prompt.count("1+2=9!") == 1


def test_rewards_are_compared_role_by_role_and_the_trainer_takes_them(executions: list[list[Sample]]) -> None:
    samples = [turn for turns in executions for turn in turns]
    args = make_args()
    raw, compared = compare_by_role(args, samples)
    for role in ("solver", "checker", "reviser"):
        members = [position for position, sample in enumerate(samples) if sample.metadata["role"] == role]
        alone = normalize_group_rewards([raw[n] for n in members], [0] * len(members), members)
        assert [compared[n] for n in members] == alone.tolist()
    assert compared[samples.index(executions[0][0])] > 0 > compared[samples.index(executions[1][0])]
    assert compared[samples.index(executions[1][2])] == 0.0  # nobody to compare with
    trained = to_train_samples(
        samples, algorithm=s.AlgorithmConfig(), reward=s.RewardConfig(), args=args, processed_rewards=(raw, compared)
    )
    assert [one.reward for one in trained] == pytest.approx(compared)
    assert {one.rollout_mask_sum for one in trained if one.rollout_id == executions[1][0].rollout_id} == {2.0 + 1.0 + 2.0}


def test_each_roles_reward_is_a_metric(executions: list[list[Sample]]) -> None:
    metrics: dict[str, float] = {"rollout/kept": 1.0}
    assert log_roles(0, make_args(), [turn for turns in executions for turn in turns], metrics, 0.0) is False
    assert metrics == {
        "rollout/kept": 1.0,
        "rollout/solver_turns": 2.0,
        "rollout/solver_reward": 0.5,
        "rollout/checker_turns": 2.0,
        "rollout/checker_reward": 1.0,
        "rollout/reviser_turns": 1.0,
        "rollout/reviser_reward": 1.0,
    }
