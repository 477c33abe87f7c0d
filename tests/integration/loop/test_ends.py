"""However a run ends, it says why and leaves no process and no shared memory."""

import signal
import time

import pytest

from runs import Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_ctrl_c_ends_the_run_cleanly(flags, tmp_path):
    run = Run(flags(), tmp_path / "out.txt")
    run.wait_for("step 1/4")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.output[-3000:]
    assert "interrupted" in run.output
    assert "Traceback" not in run.output
    run.assert_nothing_left()


def kill_one(run, words):
    """SIGKILL the process of the run whose command line has all of `words`."""
    import os

    pid = next(pid for pid, command in run.processes().items() if all(word in command for word in words))
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


@pytest.mark.parametrize(
    ("words", "named"),
    [(["ray::MegatronTrain"], "trainer 0 died"), (["vllm.entrypoints"], "engine 0 died")],
)
def test_a_dead_part_ends_the_run_naming_it(flags, tmp_path, words, named):
    run = Run(flags(num_rollout=1000, save=None, save_interval=None), tmp_path / "out.txt")
    run.wait_for("step 1/1000")
    kill_one(run, words)
    assert run.wait(60) == 1, run.output[-3000:]
    assert named in run.output
    assert "Traceback" not in run.output
    run.assert_nothing_left()
