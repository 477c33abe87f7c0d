"""Engines fail in a run with --use-fault-tolerance, and it goes on."""

import json
import re

import pytest
from whole_runs import Run, metrics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_a_killed_and_a_stopped_engine_are_replaced_at_the_current_version_and_nothing_is_lost(flags, tmp_path):
    given = flags(
        num_rollout=3,
        rollout_num_gpus=2,
        save_hf=None,
        save_interval=None,
        vllm_enable_deterministic_inference=None,
        custom_generate_function_path="faults.generate_and_fail",
        use_fault_tolerance=True,
        rollout_health_check_interval=1,
        rollout_health_check_timeout=10,
        rollout_health_check_first_wait=0,
        log_samples=16,
    )
    run = Run(given, tmp_path / "out.txt")
    assert run.wait(500) == 0, run.output[-3000:]
    assert run.output.count("is replaced:") == 2, run.output
    assert re.search(r"engine \d is replaced: engine \d died", run.output), run.output
    assert re.search(r"engine \d is replaced: it is ill: .*did not finish '/is_paused' within 10 s", run.output), run.output
    assert "serving weight version 1" in run.output
    steps = [line for line in metrics(tmp_path / "run") if line["source"] == "step"]
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert all(line["rollout/failed_samples"] == 0 for line in steps)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {(sample["step"], sample["weight_version"]) for sample in samples} == {(0, "0"), (1, "1"), (2, "2")}
    run.assert_nothing_left()
