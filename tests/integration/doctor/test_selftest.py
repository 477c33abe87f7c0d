"""How the self-test's parts fail: by themselves, by not ending, by being killed. The parts here are made up, their processes real."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import psutil
import pytest

from vime.doctor.findings import State
from vime.doctor.selftest import Planned, SelfTest, agreement, skip_hopeless

pytestmark = pytest.mark.integration

PARTS = """
import json, os, signal, subprocess, sys, threading

def step(name):
    print(json.dumps({"name": name, "found": "done", "seconds": 0.1}), flush=True)

part, folder = sys.argv[1:]
step("first")
if part == "fails":
    raise ValueError("a broken part")
if part == "tells":
    print(json.dumps({"failed": "EngineError: it ended.\\nLast lines of its log:\\nfirst error: no memory\\n..."}))
    sys.exit(1)
if part == "killed":
    os.kill(os.getpid(), signal.SIGSEGV)
if part == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    open(folder + "/draft", "w").write(str(child.pid))
    os.rename(folder + "/draft", folder + "/child")
    threading.Event().wait()
step("second")
"""


@pytest.fixture
def test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SelfTest:
    (tmp_path / "made_up_parts.py").write_text(PARTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return SelfTest(tmp_path, module="made_up_parts")


def planned(part: str, seconds: float = 60.0, needs: str = "") -> Planned:
    return Planned(part=part, needs=frozenset(needs.split()), seconds=seconds, cure="read {folder}/log")


def test_a_part_that_goes_well_tells_its_steps(test: SelfTest) -> None:
    assert [(finding.name, finding.state, finding.seconds) for finding in test.run(planned("well"))] == [
        ("first", State.OK, 0.1),
        ("second", State.OK, 0.1),
    ]


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ("fails", "ValueError: a broken part"),
        ("killed", "killed by signal 11"),
        ("tells", "EngineError: it ended. Last lines of its log: first error: no memory"),
    ],
)
def test_a_part_that_fails_says_why_and_after_what(test: SelfTest, part: str, why: str, tmp_path: Path) -> None:
    first, last = test.run(planned(part))
    assert first.state is State.OK
    assert (last.name, last.state) == (part, State.WRONG)
    assert last.found == f"{why} (after 'first')"
    assert last.cure == f"read {tmp_path}/log"


def test_a_part_that_does_not_end_is_ended_with_its_children(test: SelfTest, tmp_path: Path) -> None:
    for seconds in (4.0, 30.0, 120.0):  # however slowly it comes as far as to hang
        last = test.run(planned("hangs", seconds=seconds))[-1]
        assert last.found.startswith(f"not done after {seconds:g} s")
        if (tmp_path / "child").exists():
            break
    child = int((tmp_path / "child").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):  # it is going, but was no child of ours
        psutil.Process(child).wait(timeout=60)


def test_parts_and_checks_come_back_in_their_orders(test: SelfTest) -> None:
    tested, checked = test.side_by_side([planned("fails"), planned("well")], [lambda: 1, lambda: 2])
    assert [findings[-1].state for findings in tested] == [State.WRONG, State.OK]
    assert checked == [1, 2]


def test_what_fails_for_want_of_a_broken_package_is_skipped(test: SelfTest) -> None:
    part = planned("fails", needs="torch numpy")
    findings = skip_hopeless({part: test.run(part)}, ["torch"])
    assert [(finding.state, finding.found) for finding in findings] == [(State.OK, "done"), (State.SKIPPED, "needs torch (see above)")]


def test_nothing_is_started_once_closed(test: SelfTest) -> None:
    test.close()
    assert test.run(planned("well")) == []


@pytest.mark.parametrize(
    ("theirs", "state"), [([-1.0, -2.00001], State.OK), ([-1.0, -2.01], State.WRONG), ([-1.0, float("nan")], State.WRONG)]
)
def test_engine_and_trainer_are_compared(tmp_path: Path, theirs: list[float], state: State) -> None:
    (tmp_path / "trainer.json").write_text("[-1.0, -2.0]")
    assert agreement(tmp_path) is None
    (tmp_path / "engine.json").write_text(json.dumps(theirs))
    finding = agreement(tmp_path)
    assert finding is not None
    assert finding.state is state
