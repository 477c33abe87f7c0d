"""Users' functions that raise inside the rollout manager are blamed by flag, path and line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.rollout.plugins import HERE
from vime.config import RunConfig
from vime.config.sections import RolloutConfig
from vime.ray.rollout import RolloutClient

# The manager sends its process's output to a log, so it lives in a process of its own; nothing of Ray is started.
MANAGER = """
import json, sys
from pathlib import Path
from vime.config import RunConfig, sections as s
from vime.ray.rollout import RolloutManager

folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
found = []
for case in cases:
    config = RunConfig(
        data=s.DataConfig(**case["data"]),
        rollout=s.RolloutConfig(**case.get("rollout", {})),
        eval=s.EvalConfig(**case.get("eval", {})),
    )
    manager = RolloutManager(config, str(folder), str(folder))
    try:
        manager.init(case.get("load"))
        manager.begin(0, 2)
        if case["call"] == "produce_and_watch":  # a driver that does not wait for a batch is told, too
            manager._producing()
            manager.watch()
        getattr(manager, case["call"])(*("0", 0) if case["call"] == "save" else (0,))
        found.append(["nothing", ""])
    except Exception as error:
        found.append([type(error).__name__, str(error)])
    manager.stop()
(folder / "found.json").write_text(json.dumps(found))
"""

FAULTY, SOURCE = f"{HERE}.raising_rollout", f"{HERE}.RaisingSource"
SFT = "vime.rollout.sft_rollout.generate_rollout"
ONE: dict[str, Any] = {"rollout_batch_size": 1}
TWO: dict[str, Any] = {"data_source_path": SOURCE, "rollout_batch_size": 2}
RAISED = [
    ({"data": ONE, "rollout": {"rollout_function_path": FAULTY}, "call": "generate"}, f"--rollout-function-path {FAULTY}", "'nothing'"),
    (
        {"data": ONE, "rollout": {"rollout_function_path": FAULTY, "max_weight_staleness": 1}, "call": "generate"},
        f"--rollout-function-path {FAULTY}",
        "'nothing'",
    ),
    (
        {"data": ONE, "rollout": {"rollout_function_path": FAULTY, "max_weight_staleness": 1}, "call": "produce_and_watch"},
        f"--rollout-function-path {FAULTY}",
        "'nothing'",
    ),
    ({"data": ONE, "rollout": {"rollout_function_path": FAULTY}, "call": "evaluate"}, f"--rollout-function-path {FAULTY}", "'nothing'"),
    ({"data": ONE, "eval": {"eval_function_path": FAULTY}, "call": "evaluate"}, f"--eval-function-path {FAULTY}", "'nothing'"),
    ({"data": TWO | ONE, "call": "save"}, f"--data-source-path {SOURCE}", "'made'"),
    ({"data": TWO, "load": "x", "call": "save"}, f"--data-source-path {SOURCE}", "'loaded'"),
    ({"data": TWO, "call": "save"}, f"--data-source-path {SOURCE}", "'saved'"),
    ({"data": TWO, "rollout": {"rollout_function_path": SFT}, "call": "generate"}, f"--data-source-path {SOURCE}", "'asked'"),
]
NUMBERS = f"{HERE}.rollout_of_numbers"
OTHERS = [
    ({"data": ONE, "rollout": {"rollout_function_path": NUMBERS}, "call": "generate"}, "HookError", "returned a int among its samples"),
    (
        {"data": ONE, "eval": {"eval_function_path": NUMBERS}, "call": "evaluate"},
        "HookError",
        f"{NUMBERS} returned a list; right:",
    ),
    # Ours: without --hf-checkpoint there is no tokenizer, which is the user's to mend, but not in a function.
    ({"data": ONE, "rollout": {"rollout_function_path": SFT}, "call": "generate"}, "CheckpointError", "--hf-checkpoint is not given"),
]


SAVE_AHEAD = """
import json, sys, threading
from pathlib import Path
from vime.config import RunConfig, sections as s
from vime.ray.rollout import RolloutManager

taken, saved = threading.Event(), threading.Event()

def waits(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(1)
    taken.set()
    assert saved.wait(60.0)
    return groups

folder = Path(sys.argv[1])
rollout = s.RolloutConfig(rollout_function_path="__main__.waits", max_weight_staleness=1, rollout_deadline=2.0)
manager = RolloutManager(RunConfig(data=s.DataConfig(rollout_batch_size=1), rollout=rollout), str(folder), str(folder))
manager.init(None)
manager.begin(0, 2)
manager._producing()
assert taken.wait(60.0)
manager.save(str(folder), -1)
saved.set()
manager.stop()
"""


def test_a_commit_does_not_wait_for_a_call_that_runs_ahead_and_holds_its_groups(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SAVE_AHEAD, str(tmp_path)], timeout=120, check=True)
    in_flight = json.loads((tmp_path / "ledger.json").read_text())["in_flight"]
    assert [group[0]["group_index"] for group in in_flight] == [0]


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_evaluation_has_time_for_the_call_that_runs_ahead_and_for_its_own(staleness: int) -> None:
    config = RunConfig(rollout=RolloutConfig(max_weight_staleness=staleness, rollout_deadline=1000.0))
    deadlines: dict[str, float] = {}

    def get(refs: Any, *, names: list[str], phase: str, deadline: float) -> list[Any]:
        deadlines[phase] = deadline
        return [None]

    manager = SimpleNamespace(evaluate=SimpleNamespace(remote=lambda rollout_id: None))
    RolloutClient(config, cast(Any, SimpleNamespace(get=get)), manager, []).evaluate(0)
    assert deadlines["evaluation"] > (1 + staleness) * 1000.0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """[kind of error, message] of each case."""
    folder = tmp_path_factory.mktemp("manager")
    cases = json.dumps([case for case, *_ in [*RAISED, *OTHERS]])
    subprocess.run([sys.executable, "-c", MANAGER, str(folder), cases], timeout=120, check=True)
    return json.loads((folder / "found.json").read_text())


def test_what_users_functions_raise_names_flag_path_and_line(found: list[list[str]]) -> None:
    for (_, blamed, raised), (kind, message) in zip(RAISED, found, strict=False):
        assert kind == "HookError", message
        assert message.startswith(f"{blamed} raised KeyError: {raised} at ")
        assert "plugins.py:" in message


def test_wrong_returns_are_named_and_our_own_errors_stay_as_they_are(found: list[list[str]]) -> None:
    for (_, kind, said), (got, message) in zip(OTHERS, found[len(RAISED) :], strict=True):
        assert got == kind, message
        assert said in message
