"""However a run ends, it says why and leaves no process and no shared memory."""

import os
import re
import signal

import pytest
from whole_runs import Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_ctrl_c_ends_the_run_cleanly(flags, tmp_path):
    run = Run(flags(), tmp_path / "out.txt")
    run.wait_for("step 1/4")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.output[-3000:]
    assert "interrupted" in run.output
    assert "Traceback" not in run.output
    run.assert_nothing_left()


def kill_one(run, pattern):
    """SIGKILL a process of the run by its command line."""
    pid = next(pid for pid, command in run.processes().items() if re.search(pattern, command))
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("^ray::MegatronTrain", "trainer 0 died"),
        (r"^\S*python\S* -m vllm\.entrypoints", "engine 0 died"),
    ],
)
def test_a_dead_part_ends_the_run_naming_it(flags, tmp_path, pattern, named):
    run = Run(flags(num_rollout=1000, save=None, save_interval=None), tmp_path / "out.txt")
    run.wait_for("step 1/1000")
    kill_one(run, pattern)
    assert run.wait(60) == 1, run.output[-3000:]
    assert named in run.output
    assert "Traceback" not in run.output
    run.assert_nothing_left()
