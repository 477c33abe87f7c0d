"""Three roles, trained together through the whole loop."""

import pytest
from whole_runs import Run, metrics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROLES = "examples.multi_agent.roles"


def test_each_roles_turns_are_generated_and_trained(flags, tmp_path):
    run = Run(
        flags(
            num_rollout=2,
            save_hf=None,
            custom_generate_function_path=f"{ROLES}.solve_check_revise",
            custom_reward_post_process_path=f"{ROLES}.compare_by_role",
            custom_rollout_log_function_path=f"{ROLES}.log_roles",
            custom_rm_path="examples.quickstart.reward.verified",
            rollout_skip_special_tokens=True,
        ),
        tmp_path / "run.txt",
    )
    assert run.wait() == 0, run.output[-3000:]
    for line in metrics(tmp_path / "run"):
        if line["source"] == "step":
            assert line["rollout/solver_turns"] == line["rollout/checker_turns"] == 16
            assert 0 <= line["rollout/reviser_turns"] <= 16
            assert 0 <= line["rollout/checker_reward"] <= 1
            assert line["train/train_rollout_logprob_abs_diff"] < 1e-4  # each turn is trained as it was sampled
