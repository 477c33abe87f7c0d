"""Generation ahead of the trainer in a whole run: weights change while requests are in flight, and nothing is lost or trained twice."""

import pytest
from whole_runs import Run, metrics

from vime.cli.main import main

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_a_run_that_generates_ahead_keeps_its_bound_and_its_books(flags, assets, tmp_path, capsys):
    ahead = {"max_weight_staleness": 1, "update_weight_in_flight": True, "use_tis": True, "keep_old_actor": True}
    own = {"rollout_max_response_len": 24, "vllm_enable_deterministic_inference": False, "save_hf": None, "log_passrate": True}
    held = {"eval_prompt_data": ["held", assets["heldout"]], "eval_interval": 2, "skip_eval_before_train": True}
    run = Run(flags(**ahead, **own, **held), tmp_path / "out.txt")
    assert run.wait() == 0, run.output[-3000:]
    run.assert_nothing_left()
    lines = metrics(tmp_path / "run", timing=True)
    steps = [line for line in lines if line["source"] == "step"]
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    assert [line["rollout/staleness/max"] for line in steps] == [0.0, 1.0, 1.0, 1.0]  # a batch is ahead in each step but the first
    assert all(line["perf/update_weights_proof_max_abs_diff"] <= 1e-4 for line in steps)
    assert all(line["train/grad_norm"] > 0 for line in steps)
    assert all(
        {"perf/engine_idle_time", "perf/trainer_idle_time", "rollout/queue_depth", "passrate/pass@4"} <= line.keys() for line in steps
    )
    assert steps[-1]["rollout/groups_in_flight"] == steps[-1]["rollout/queue_depth"] == 0.0  # nothing is begun that no step takes
    assert len([line for line in lines if line["source"] == "eval"]) == 2
    assert main(["audit", str(tmp_path / "run")]) == 0, capsys.readouterr().out
