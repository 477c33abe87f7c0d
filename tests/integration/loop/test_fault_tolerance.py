"""Engines fail in a run with --use-fault-tolerance, the trained model's and a frozen judge's, and it goes on."""

import json
import re
import shutil

import pytest
from whole_runs import Run, metrics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

CONFIG = """
vllm:
  - name: judge
    model_path: {judge}
    server_groups: [{{num_gpus: 1, overrides: {{max_num_seqs: 8}}}}]
  - name: policy
    server_groups: [{{num_gpus: 1}}]
"""


def test_a_killed_engine_and_a_stopped_judge_are_replaced_at_their_versions_and_nothing_is_lost(flags, assets, tmp_path):
    judge = tmp_path / "judge"
    shutil.copytree(assets["model"], judge)
    (tmp_path / "served.yaml").write_text(CONFIG.format(judge=judge))
    given = flags(
        num_rollout=3,
        vllm_config=tmp_path / "served.yaml",
        save_hf=None,
        save_interval=None,
        vllm_enable_deterministic_inference=None,
        custom_generate_function_path="faults.generate_and_fail",
        custom_rm_path="faults.judged",
        use_fault_tolerance=True,
        rollout_health_check_interval=1,
        rollout_health_check_timeout=10,
        rollout_health_check_first_wait=0,
        log_samples=16,
    )
    run = Run(given, tmp_path / "out.txt")
    assert run.wait(800) == 0, run.output[-3000:]
    assert run.output.count("is replaced:") == 2, run.output
    assert re.search(r"^engine 0 is replaced: (engine 0 died|it is ill: .* cannot be reached)", run.output, re.MULTILINE), run.output
    assert re.search(r"^judge engine 0 is replaced: it is ill: .*did not finish '/is_paused' within 10 s", run.output, re.MULTILINE), (
        run.output
    )
    assert "engine 0 replaced, and serving weight version 1\n" in run.output
    assert "judge engine 0 replaced, and serving\n" in run.output
    steps = [line for line in metrics(tmp_path / "run") if line["source"] == "step"]
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert all(line["rollout/failed_samples"] == 0 for line in steps)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {(sample["step"], sample["weight_version"]) for sample in samples} == {(0, "0"), (1, "1"), (2, "2")}
    run.assert_nothing_left()
