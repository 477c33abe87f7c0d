"""The status reads well in a log: one line per step."""

import io

import pytest

from vime.observability.status import Status, duration


def test_a_log_gets_one_line_per_step_and_no_control_characters():
    out = io.StringIO()
    status = Status(2, stream=out)
    status.phase(0, "rollout")
    status.step(0, {"rollout/raw_reward": 0.5, "train/loss": 0.1}, {"rollout": 1.0, "train": 2.0})
    assert out.getvalue().count("\n") == 1
    assert "\r" not in out.getvalue()
    assert "step 1/2  reward 0.500  loss 0.1000  rollout 1.0s train 2.0s  ETA " in out.getvalue()


def test_a_loss_just_below_zero_is_shown_without_a_sign():
    out = io.StringIO()
    Status(1, stream=out).step(0, {"train/loss": -1e-9}, {})
    assert "loss 0.0000" in out.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(5, "5s"), (65, "1m05s"), (3725, "1h02m")])
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text
