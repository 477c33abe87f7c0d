"""Three roles of one model work on one sum: a solver writes a draft, a checker says whether it is right, and where the checker
says no, a reviser answers anew.

    --custom-generate-function-path examples.multi_agent.roles.solve_check_revise
    --custom-reward-post-process-path examples.multi_agent.roles.compare_by_role
    --custom-rollout-log-function-path examples.multi_agent.roles.log_roles

Each role's turn is a sample of its own: own prompt, own tokens, own mask, own reward. All turns of one execution share its rollout_id,
so that the loss gives every execution the same weight however many turns it took. Rewards are compared inside a group role by
role: a checker is no better for the solver's having had an easy prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from examples.quickstart.reward import verified
from vime.algorithms.group_norm import normalize_group_rewards
from vime.rollout.vllm_rollout import GenerateState, generate
from vime.utils.types import Sample

__all__ = ["ROLES", "compare_by_role", "log_roles", "solve_check_revise"]

ROLES = ("solver", "checker", "reviser")
RIGHT = "1"  # what a checker begins with when it takes the draft for right


async def solve_check_revise(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> list[Sample] | Sample:
    """One execution: the turns of two or three roles. In evaluation the answer that stands at the end."""
    question = sample.metadata["reasoning_gym"]["entry"]["metadata"]["expression"].replace(" ", "") + "="
    solver = await _turn(args, sample, "solver", question, sampling_params)
    solver.reward = await verified(args, solver)
    draft = solver.response.strip()
    checker = await _turn(args, sample, "checker", f"{question}{draft}?", sampling_params)
    accepts = checker.response.startswith(RIGHT)
    checker.reward = float(accepts == (solver.reward == 1.0))
    checker.loss_mask = [int(position == 0) for position in range(checker.response_length)]  # its verdict is one token
    turns, answer = [solver, checker], solver
    if not accepts:
        answer = await _turn(args, sample, "reviser", f"{question}{draft}!", sampling_params)
        answer.reward = await verified(args, answer)
        turns.append(answer)
    return answer if evaluation else turns


async def _turn(args: Any, sample: Sample, role: str, message: str, sampling_params: dict[str, Any]) -> Sample:
    """What the model says to `message` in that role, as a sample of the same execution."""
    turn = copy.deepcopy(sample)
    turn.rollout_id = sample.index
    turn.metadata["role"] = role
    turn.prompt = GenerateState(args).tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    return await generate(args, turn, dict(sampling_params))


def compare_by_role(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """(rewards, rewards compared with those of the same role in the same group); a role that occurs once in a group gets 0."""
    raw = [sample.get_reward_value(args) for sample in samples]
    groups = [int(sample.group_index or 0) * len(ROLES) + ROLES.index(sample.metadata["role"]) for sample in samples]
    executions = [int(sample.rollout_id or 0) for sample in samples]
    compared = normalize_group_rewards(raw, groups, executions, comparison="mean_std")
    return raw, compared.tolist()


def log_roles(rollout_id: int, args: Any, samples: Sequence[Sample], extra_metrics: dict[str, float], rollout_time: float) -> bool:
    """Mean reward and number of turns of each role, beside the usual metrics."""
    for role in ROLES:
        rewards = [sample.get_reward_value(args) for sample in samples if sample.metadata["role"] == role]
        extra_metrics[f"rollout/{role}_turns"] = float(len(rewards))
        if rewards:
            extra_metrics[f"rollout/{role}_reward"] = float(np.mean(rewards))
    return False
