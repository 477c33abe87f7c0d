"""The audit: a run that was honest is clean, however it ended; each way of losing or repeating a prompt is named."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rules.source import ROOT
from tests.unit.rollout.support import make_args, make_tokenizer
from vime.audit.report import Report, as_json, as_text, audit
from vime.checkpoint import begin_commit, latest_commit
from vime.cli.main import main
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.ledger import State
from vime.rollout.tracking import OVERDUE_STEPS, TrackedSource
from vime.utils.types import Sample

SAVE_EVERY = 2
BATCH = 3


class MiniRun:
    """The data's side of a run: the real source, ledger and commits; training and generating take no time."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = self.log_dir = folder
        folder.mkdir()
        prompts = folder / "prompts.jsonl"
        rows = ["p0", "p1", "far too long", "p3", "p4", "p5", "p6"]
        prompts.write_text("".join(json.dumps({"input": row}) + "\n" for row in rows))
        flags = {"rollout_shuffle": True, "n_samples_per_prompt": 2, "rollout_max_prompt_len": 4}
        self.args = make_args(hf_checkpoint=str(model), prompt_data=str(prompts), **flags)

    def start(self) -> tuple[TrackedSource, int]:
        """(source, first step): from the newest commit, as a run's command does."""
        commit = latest_commit(self.folder)
        folders: dict[str, Any] = {"run_dir": self.folder, "log_dir": self.log_dir, "load": commit.rollout if commit else None}
        source = TrackedSource(RolloutDataSourceWithBuffer(self.args), "vime.rollout.data_source.RolloutDataSourceWithBuffer", **folders)
        return source, commit.rollout_id + 1 if commit else 0

    def steps(self, number: int, *, then: Callable[[TrackedSource], None] | None = None) -> None:
        """`number` further steps; `then` is what happens before it is killed."""
        source, first = self.start()
        self.log_dir.mkdir(exist_ok=True)
        for step in range(first, first + number):
            self.step(source, step)
            if (step + 1) % SAVE_EVERY == 0:
                self.commit(source, step)
        if then is not None:
            then(source)

    def step(self, source: TrackedSource, step: int) -> None:
        """One batch of BATCH groups, one group more for the buffer, and one that a filter drops."""
        source.begin_step(step, trained_through=step - 1)
        *batch, dropped, surplus = source.get_samples(BATCH + 2)
        for sample in (sample for group in [*batch, dropped, surplus] for sample in group):
            sample.append_response_tokens(tokens=[5], log_probs=[-0.5], weight_versions=[str(step)])
            sample.status = Sample.Status.COMPLETED
        source.end_group(dropped, State.FILTERED, "zero std")
        source.add_samples([surplus])
        source.trained([sample for group in batch for sample in group], step)
        line = {"step": step, "source": "step", **source.metrics()}
        path = self.log_dir / "metrics.jsonl"
        kept = [old for old in (path.read_text().splitlines() if path.exists() else []) if json.loads(old)["step"] < step]
        path.write_text("".join(old + "\n" for old in [*kept, json.dumps(line)]))

    def commit(self, source: TrackedSource, step: int) -> None:
        """Save."""
        begin_commit(self.folder, step, weight_version=step + 1, writers={"rollout": lambda to: source.save(to, step)}, keep=2).finish()

    def edit(self, *statements: str) -> None:
        """Change the ledger behind its back."""
        db = sqlite3.connect(self.folder / "ledger.sqlite")
        for statement in statements:
            assert db.execute(statement).rowcount > 0, statement
        db.commit()
        db.close()

    @property
    def report(self) -> Report:
        return audit(self.folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, model: Path) -> MiniRun:
    return MiniRun(tmp_path / "run", model)


def kinds(report: Report) -> set[str]:
    """The kinds of what was found."""
    return {finding.kind for finding in report.findings}


def test_a_run_is_clean_and_its_states_add_up(run: MiniRun) -> None:
    run.steps(5)
    report = run.report
    assert report.findings == []
    assert report.groups == {"trained": 15, "filtered": 5, "kept": 1}
    assert report.samples == {"trained": 30, "filtered": 10}
    assert report.left_out["too long"] in (3, 4)
    assert (report.last_step, report.committed_step, report.commits, report.resumed_after, report.notes) == (4, 3, 2, [], [])


def test_a_run_that_was_killed_and_resumed_is_clean_and_says_what_was_issued_again(run: MiniRun) -> None:
    run.steps(3, then=lambda source: source.get_samples(2))  # killed with groups out, after the commit of step 1
    assert run.report.findings == []
    run.steps(3)
    report = run.report
    assert report.findings == []
    assert report.resumed_after == [1]
    assert report.groups["trained"] == 15
    assert report.undone == report.issued_again > 0
    assert "resumed after step 1" in as_text(report)


def test_each_row_is_trained_at_most_once_an_epoch_and_none_is_passed_over(run: MiniRun) -> None:
    for _ in range(4):
        run.steps(3)
    assert run.report.findings == []
    db = sqlite3.connect(run.folder / "ledger.sqlite")
    whole = db.execute(
        "SELECT epoch, count(*), count(DISTINCT row) FROM draws WHERE undone_by IS NULL GROUP BY epoch ORDER BY epoch"
    ).fetchall()[:-1]
    assert len(whole) >= 4
    assert set(whole) == {(epoch, 7, 7) for epoch in range(len(whole))}


def test_weighted_sources_are_followed_each_in_its_own_epochs(run: MiniRun) -> None:
    other = run.folder / "other.jsonl"
    other.write_text("".join(json.dumps({"input": f"q{n}"}) + "\n" for n in range(4)))
    flags = {"rollout_shuffle": True, "n_samples_per_prompt": 2, "rollout_max_prompt_len": 4}
    spec = f"3*{run.args.prompt_data},1*{other}"
    run.args = make_args(hf_checkpoint=run.args.hf_checkpoint, prompt_data=spec, **flags)
    for _ in range(3):
        run.steps(3)
    assert run.report.findings == []
    assert len(run.report.epochs) == 2
    run.edit("UPDATE draws SET position = position - 1 WHERE source = 1 AND position = 2")
    assert {"drawn twice", "lost"} <= kinds(run.report)


def test_groups_of_the_users_own_in_the_buffer_are_no_finding(run: MiniRun) -> None:
    def give_and_save(source: TrackedSource) -> None:
        source.add_samples([[Sample(prompt="mine", group_index=1_000_000, index=2_000_000 + n) for n in range(2)]])
        run.step(source, 2)
        run.commit(source, 2)

    run.steps(2, then=give_and_save)
    assert run.report.findings == []


def test_groups_that_are_in_flight_at_a_commit_stand_in_it(run: MiniRun) -> None:
    def save_with_groups_out(source: TrackedSource) -> None:
        run.step(source, 4)
        source.get_samples(2)
        run.commit(source, 4)

    run.steps(4, then=save_with_groups_out)
    assert run.report.findings == []
    assert run.report.groups["issued"] == 2
    mark = run.folder / "iter_0000004" / "rollout" / "ledger.json"
    record = json.loads(mark.read_text())
    record["in_flight"].pop()
    text = json.dumps(record)
    mark.write_text(text + " " * (mark.stat().st_size - len(text)))
    (finding,) = run.report.findings
    assert finding.kind == "lost"
    assert "is issued and has not ended, but the commit of step 4 (iter_0000004) does not hold it" in finding.text
    assert finding.place is not None
    assert finding.place.startswith(f"{run.args.prompt_data}:")


def test_a_group_that_comes_back_after_it_counted_as_dropped_is_no_finding(run: MiniRun) -> None:
    def give_back_late(source: TrackedSource) -> None:
        (late,) = source.get_samples(1)
        number, last = late[0].group_index, OVERDUE_STEPS + 3
        for step in range(2, last):
            run.step(source, step)
        assert source.ledger.state(number) is State.DROPPED
        source.add_samples([late])
        run.commit(source, last - 1)
        run.step(source, last)
        assert source.ledger.state(number) is State.TRAINED

    run.steps(2, then=give_back_late)
    assert run.report.findings == []
    run.steps(2)
    assert run.report.findings == []


BROKEN = {
    "a group that is trained again": (
        "INSERT INTO events SELECT (SELECT max(seq) + 1 FROM events), 1, NULL, grp, 'trained', 4, NULL, NULL FROM events "
        "WHERE state = 'trained' AND step = 0 LIMIT 1",
        "trained twice",
        "was trained at steps 0 and 4",
    ),
    "a sample that ends twice in a group": (
        "INSERT INTO outcomes SELECT * FROM outcomes WHERE state = 'trained' LIMIT 1",
        "trained twice",
        "sample 0 of group 0",
    ),
    "a sample without an end": ("DELETE FROM outcomes WHERE sample = 1", "lost", "sample 1) is trained, but these"),
    "an entry that was taken out": ("DELETE FROM events WHERE grp = 0 AND state = 'trained'", "entries missing", "between entry"),
    "a row that was drawn twice": ("UPDATE draws SET position = 0 WHERE seq = 2", "drawn twice", "when number 1 of epoch 0 is due"),
    "a row that was passed over": ("UPDATE draws SET position = position + 1 WHERE epoch = 0 AND seq > 3", "lost", "of epoch 0 is due"),
    "a row that came out of turn": ("UPDATE draws SET row = (row + 1) % 7 WHERE position = 3", "wrong order", "is not row 3 of epoch 0"),
    "a row that gave nothing": ("UPDATE draws SET reason = NULL WHERE reason = 'too long'", "lost", "gave no group, and no reason"),
    "a group that the commit would train again": (
        "UPDATE events SET state = 'filtered' WHERE state = 'kept' AND seq = (SELECT max(seq) FROM events WHERE state = 'kept')",
        "to be trained twice",
        "has ended, but the commit of step 3",
    ),
    "a step with other samples": (
        "UPDATE outcomes SET state = 'filtered' WHERE sample = 0 AND state = 'trained'",
        "disagreement",
        "6 samples were trained at step 0, the ledger 5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_found_and_named(run: MiniRun, case: str) -> None:
    statement, kind, said = BROKEN[case]
    run.steps(4)
    assert run.report.findings == []
    run.edit(statement)
    found = run.report.findings
    assert kind in {finding.kind for finding in found}, found
    assert any(said in finding.text for finding in found if finding.kind == kind), found


def test_a_step_that_metrics_lack_is_named(run: MiniRun) -> None:
    run.steps(4)
    path = run.folder / "metrics.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:-1]) + '{"step": 9, "sou')
    (finding,) = run.report.findings
    assert str(finding) == "disagreement: metrics.jsonl lacks step 3, which the ledger trained"


def test_a_run_whose_logs_went_to_another_folder_is_compared_with_all_of_them(run: MiniRun, tmp_path: Path) -> None:
    logs = [tmp_path / name for name in ("first", "second", "first")]
    for number, run.log_dir in zip((5, 3, 1), logs, strict=True):  # each but the last is killed after a step without a commit
        run.steps(number)
        assert run.report.findings == []
    assert (run.report.resumed_after, run.report.notes) == ([3, 5], [])
    path = tmp_path / "second" / "metrics.jsonl"
    first, *_ = path.read_text().splitlines()
    record = json.loads(first)
    assert record["step"] == 4
    path.write_text(json.dumps(record | {"ledger/trained_samples": 5.0}) + "\n")
    assert [finding.text for finding in run.report.findings] == [
        f"{path} says that 5 samples were trained at step 4, the ledger 6",
        f"{path} lacks step 5, which the ledger trained",
    ]
    path.unlink()
    assert (run.report.findings, run.report.notes) == ([], [f"there is no {path}, so the steps are not compared with it"])


def test_a_start_that_was_killed_before_its_first_step_is_no_finding(run: MiniRun) -> None:
    run.steps(5)
    run.start()  # undoes step 4, whose line goes when the first step is near
    assert run.report.findings == []


@pytest.mark.parametrize("goes_on", [False, True])
def test_logs_that_were_moved_with_the_run_are_found(run: MiniRun, tmp_path: Path, goes_on: bool) -> None:
    run.steps(4)
    run.folder = run.log_dir = run.folder.rename(tmp_path / "moved")
    if goes_on:
        prompts = Path(run.args.prompt_data)  # which stay where they were
        prompts.parent.mkdir()
        shutil.copy(run.folder / prompts.name, prompts)
        run.steps(2)
    assert (run.report.findings, run.report.notes) == ([], [])
    path = run.folder / "metrics.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[1:]))
    assert [finding.text for finding in run.report.findings] == ["metrics.jsonl lacks step 0, which the ledger trained"]


def test_a_torn_commit_is_named(run: MiniRun) -> None:
    run.steps(4)
    (run.folder / "iter_0000003" / "rollout" / "data_source.json").unlink()
    assert kinds(run.report) == {"torn"}


def test_a_lost_ledger_is_told_and_the_rest_is_audited(run: MiniRun) -> None:
    run.steps(2)
    for file in run.folder.glob("ledger.sqlite*"):
        file.unlink()
    run.steps(2)
    report = run.report
    assert report.findings == []
    assert report.notes == ["the ledger was lost once: what was before the commit of step 1 is not known"]


def test_the_command_says_it_in_a_few_lines_and_for_programs(run: MiniRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.steps(3)
    assert main(["audit", str(run.folder)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"vime audit {run.folder}: nothing was lost or trained twice\n")
    assert len(text.splitlines()) < 8
    run.edit("DELETE FROM outcomes WHERE sample = 1")
    assert main(["audit", "--json", str(run.folder)]) == 1
    record = json.loads(capsys.readouterr().out)
    assert not record["clean"]
    assert {finding["kind"] for finding in record["findings"]} >= {"lost"}
    assert json.loads(as_json(run.report)) == record


def test_what_cannot_be_audited_says_why_with_code_2(run: MiniRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(folder: Path) -> str:
        assert main(["audit", str(folder)]) == 2
        return capsys.readouterr().err

    assert "is no folder. Give the run's --save folder" in refused(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "holds no ledger.sqlite" in refused(tmp_path / "empty")
    run.steps(3)
    ledger = run.folder / "ledger.sqlite"
    for name, content, said in (
        ("foreign", b"SQLite is not in here" * 300, "torn, or cannot be read (file is not a database)"),
        ("cut", ledger.read_bytes()[: ledger.stat().st_size // 2 + 100], "torn"),
        ("nothing", b"", "is no ledger of vime's"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "ledger.sqlite").write_bytes(content)
        assert said in refused(folder)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    db = sqlite3.connect(theirs / "ledger.sqlite")
    db.execute("CREATE TABLE rows (x)")
    db.close()
    assert "is no ledger of vime's" in refused(theirs)


def test_a_run_that_goes_on_and_a_folder_that_cannot_be_written_are_audited(run: MiniRun, tmp_path: Path) -> None:
    run.steps(3, then=lambda source: None if audit(run.folder).clean else pytest.fail("not clean while it ran"))
    shutil.copytree(run.folder, tmp_path / "copy")
    before = {path.name: path.read_bytes() for path in (tmp_path / "copy").glob("ledger.sqlite")}
    assert audit(tmp_path / "copy").clean
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").glob("ledger.sqlite")} == before


def test_the_document_shows_what_is_printed(run: MiniRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run.steps(3, then=lambda source: source.get_samples(2))
    run.steps(3)
    monkeypatch.chdir(run.folder.parent)
    assert main(["audit", "run"]) == 0
    shown = re.search(r"```console\n\$ vime audit run\n(.*?)```", (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    assert capsys.readouterr().out == shown[1]


def test_samples_that_a_rollout_function_made_itself_are_no_finding(run: MiniRun) -> None:
    def train_own(source: TrackedSource) -> None:
        for step in (2, 3):  # the same ids in each step, as a function with a file of its own would have them
            source.begin_step(step, trained_through=step - 1)
            source.trained([Sample(index=n, group_index=n // 2) for n in range(1000, 1004)] + [Sample(rollout_id=7)], step)
            with (run.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "source": "step", **source.metrics()}) + "\n")
        run.commit(source, 3)

    run.steps(2, then=train_own)
    assert run.report.findings == []
    assert run.report.samples["trained"] == 2 * 6 + 2 * 5
