"""PPO with a critic through the whole loop: values, advantages, both trained, both in the commit; resumed over two ranks each."""

import pytest
from whole_runs import Run, metrics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

PPO = {"advantage_estimator": "ppo", "critic_lr": "1e-2", "num_critic_only_steps": 1, "lambd": 0.95, "normalize_advantages": True}
PPO |= {"async_save": True, "save_interval": 1}  # the first commit is of a policy that has taken no optimizer step


def steps(folder):
    return [line for line in metrics(folder) if line["source"] == "step"]


def test_a_run_with_a_critic_trains_both_and_resumes_both(flags, tmp_path):
    first = Run(flags(num_rollout=2, **PPO), tmp_path / "first.txt")
    assert first.wait() == 0, first.output[-3000:]
    first.assert_nothing_left(ports=False)
    warm, trained = steps(tmp_path / "run")
    assert "train/pg_loss" not in warm  # the critic alone
    assert trained["train/grad_norm"] > 0
    assert all(line["train/critic-value_loss"] > 0 and line["train/critic-grad_norm"] > 0 for line in (warm, trained))
    assert warm["train/critic-values"] == 0.0
    assert trained["train/critic-values"] != 0.0  # it has learnt something
    for commit in ("iter_0000000", "iter_0000001"):
        assert f"saved {tmp_path / 'run' / commit}" in first.output
        assert all((tmp_path / "run" / commit / part / "metadata.json").is_file() for part in ("trainer", "critic"))
    second = Run(flags(num_rollout=3, actor_num_gpus_per_node=2, **PPO), tmp_path / "second.txt")
    assert second.wait() == 0, second.output[-3000:]
    second.assert_nothing_left(ports=False)
    last = steps(tmp_path / "run")[-1]
    assert last["step"] == 2
    assert last["train/step"] == 2.0  # of the policy: one less than the critic's
    assert last["train/critic-values"] not in (0.0, trained["train/critic-values"])
