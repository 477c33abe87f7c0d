"""A user's mistake gets one message with the cure, a non-zero exit and no traceback, before any work is lost."""

import json
import shutil
from pathlib import Path

import pytest
from whole_runs import Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def refused(flags, tmp_path, *expected, code=None):
    run = Run(flags, tmp_path / "out.txt")
    got = run.wait(200)
    assert got == code if code is not None else got not in (0, 130), run.output[-3000:]
    for text in expected:
        assert text in run.output
    assert "Traceback" not in run.output
    run.assert_nothing_left()


def test_an_unknown_flag_is_refused_with_the_nearest_name(flags, tmp_path):
    refused([*flags(), "--rollout-batch-sise", "3"], tmp_path, "--rollout-batch-sise", "--rollout-batch-size", code=2)


def test_unknown_flags_of_engine_and_router_are_refused(flags, tmp_path):
    refused(
        [*flags(), "--vllm-max-num-sequences", "3", "--router-polisy", "random"],
        tmp_path,
        "--vllm-max-num-sequences",
        "--vllm-max-num-seqs",
        "--router-polisy",
        "--router-policy",
        code=2,
    )


@pytest.mark.parametrize("harm", ["no_config", "unknown_architecture", "torn_weights", "no_weights"])
def test_a_harmed_model_folder_is_refused(flags, assets, tmp_path, harm):
    model = tmp_path / "model"
    shutil.copytree(assets["model"], model)
    expected = str(model)
    if harm == "no_config":
        (model / "config.json").unlink()
    elif harm == "unknown_architecture":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"architectures": ["NovelForCausalLM"], "model_type": "novel"}))
        expected = "NovelForCausalLM"
    elif harm == "torn_weights":
        weights = (model / "model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
        expected = "model.safetensors"
    else:
        (model / "model.safetensors").unlink()
        expected = "safetensors"
    refused(flags(hf_checkpoint=model), tmp_path, expected)


def test_a_malformed_prompt_line_is_named(flags, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"input": "1 + 1", "label": "2"}\n{"input": \n')
    refused(flags(prompt_data=bad), tmp_path, f"{bad}:2")


def test_a_missing_label_is_named(flags, tmp_path):
    bad = tmp_path / "nolabel.jsonl"
    bad.write_text('{"input": "1 + 1"}\n')
    refused(flags(prompt_data=bad, custom_rm_path=None, rm_type="math", apply_chat_template=False), tmp_path, "label", f"{bad}:1")


def test_a_hook_with_a_wrong_signature_is_refused_before_anything_starts(flags, tmp_path):
    (tmp_path / "my_hooks.py").write_text("async def reward(sample):\n    return 1.0\n")
    run = flags(custom_rm_path="my_hooks.reward")
    env = {"PYTHONPATH": str(tmp_path)}
    process = Run(run, tmp_path / "out.txt", env=env)
    assert process.wait(120) != 0
    assert "--custom-rm-path" in process.output
    assert "args, sample" in process.output
    assert "Traceback" not in process.output


def test_a_reward_that_raises_ends_the_run_naming_it(flags, tmp_path):
    (tmp_path / "bad_reward.py").write_text("async def reward(args, sample, **kwargs):\n    raise ValueError('judge is broken')\n")
    run = Run(flags(custom_rm_path="bad_reward.reward"), tmp_path / "out.txt", env={"PYTHONPATH": str(tmp_path)})
    assert run.wait(200) == 1
    assert "judge is broken" in run.output
    assert "bad_reward.py:2" in run.output
    assert "Traceback" not in run.output
    run.assert_nothing_left()


def test_more_trainers_than_cores_are_refused(flags, tmp_path):
    refused(flags(actor_num_gpus_per_node=512), tmp_path, "512 trainer processes", "cores", code=2)


def test_a_folder_that_cannot_be_written_is_refused(flags, tmp_path):
    (tmp_path / "file").write_text("")
    refused(flags(save=Path(tmp_path / "file" / "run")), tmp_path, "cannot be written", code=2)
