"""A run that was killed goes on as if nothing had happened, bitwise, and leaves nothing behind."""

import pytest
from whole_runs import Run, metrics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


RECORDED = "samples/{rollout_id}.jsonl"


@pytest.fixture(scope="module")
def uninterrupted(assets, tmp_path_factory, session_flags):
    folder = tmp_path_factory.mktemp("uninterrupted")
    run = Run(session_flags(save=folder / "run", save_debug_rollout_data=folder / "run" / RECORDED), folder / "out.txt")
    assert run.wait() == 0, run.output[-3000:]
    run.assert_nothing_left()
    return folder / "run"


def test_trainer_and_engine_agree_in_every_step(uninterrupted):
    steps = [line for line in metrics(uninterrupted) if line["source"] == "step"]
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    assert all(0 < line["train/train_rollout_logprob_abs_diff"] <= 1e-4 for line in steps)
    assert all(line["train/grad_norm"] > 0 for line in steps)  # each step moves the weights


def test_the_final_checkpoint_loads_in_transformers(uninterrupted):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(uninterrupted / "hf")
    tokenizer = AutoTokenizer.from_pretrained(uninterrupted / "hf")
    assert model.config.vocab_size == len(tokenizer)


def test_every_step_of_an_uninterrupted_run_is_there_with_its_sync_proof(uninterrupted):
    steps = [line for line in metrics(uninterrupted, timing=True) if line["source"] == "step"]
    assert all(line["perf/update_weights_proof_max_abs_diff"] <= 1e-4 for line in steps)
    assert all(line["perf/update_weights_bytes"] > 0 for line in steps)


def test_a_killed_run_resumes_bitwise_equal(uninterrupted, session_flags, tmp_path):
    """kill -9 of the driver inside step 4, after the commit of step 2; then the same command again."""
    command = session_flags(save=tmp_path / "run")
    first = Run(command, tmp_path / "first.txt")
    first.wait_for("step 3/4")
    first.kill()
    first.assert_nothing_left()
    second = Run(command, tmp_path / "second.txt")
    assert second.wait() == 0, second.output[-3000:]
    second.assert_nothing_left()
    assert "steps 3 to 4" in second.output
    assert len({line["train/grad_norm"] for line in metrics(uninterrupted)}) == 4
    assert metrics(tmp_path / "run") == metrics(uninterrupted)


def test_recorded_samples_train_to_the_same_bits_without_an_engine(uninterrupted, session_flags, tmp_path):
    command = session_flags(save=tmp_path / "run", save_hf=None, load_debug_rollout_data=uninterrupted / RECORDED)
    run = Run(command, tmp_path / "out.txt")
    assert run.wait() == 0, run.output[-3000:]
    run.assert_nothing_left()
    assert not (tmp_path / "run" / "logs" / "engine_0.log").exists()

    def trained(folder):
        return [{name: value for name, value in line.items() if name.startswith("train/")} for line in metrics(folder)]

    assert len(trained(uninterrupted)) == 4
    assert trained(tmp_path / "run") == trained(uninterrupted)
