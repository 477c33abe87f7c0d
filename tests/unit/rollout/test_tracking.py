"""The tracked data source: what rollout functions take comes back, ends, or stands in the commit."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rollout.support import make_args
from vime.errors import CheckpointError, DataError
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.ledger import State
from vime.rollout.tracking import OVERDUE_STEPS, TrackedSource, outcomes_of
from vime.utils.types import Sample

Status = Sample.Status
PATH = "vime.rollout.data_source.RolloutDataSourceWithBuffer"


@pytest.fixture
def args(model_dir: Path, tmp_path: Path) -> Any:
    """Six prompts, two of them too long, in groups of two."""
    file = tmp_path / "prompts.jsonl"
    prompts = ["p0", "far too long", "p2", "p3", "much too long", "p5"]
    file.write_text("".join(json.dumps({"input": prompt}) + "\n" for prompt in prompts))
    return make_args(hf_checkpoint=str(model_dir), prompt_data=str(file), n_samples_per_prompt=2, rollout_max_prompt_len=4)


def tracked(args: Any, folder: Path, load: Path | None = None) -> TrackedSource:
    """A tracked source with its ledger in `folder`."""
    folder.mkdir(exist_ok=True)
    return TrackedSource(RolloutDataSourceWithBuffer(args), PATH, run_dir=folder, log_dir=folder, load=load)


def rows(folder: Path, query: str) -> list[Any]:
    """What another connection reads in the ledger."""
    db = sqlite3.connect(folder / "ledger.sqlite")
    try:
        return db.execute(query).fetchall()
    finally:
        db.close()


def done(group: Any, versions: str = "3") -> Any:
    """The group, generated: two tokens each."""
    for sample in group:
        sample.append_response_tokens(tokens=[5, 6], log_probs=[-0.5, -0.5], weight_versions=list(versions) * (2 // len(versions)))
        sample.status = Status.COMPLETED
    return group


def test_every_row_that_is_drawn_is_entered_with_its_line_and_why_it_is_left_out(args: Any, tmp_path: Path) -> None:
    source = tracked(args, tmp_path / "run")
    source.get_samples(3)
    source.get_samples(2)
    found = rows(tmp_path / "run", "SELECT epoch, position, row, line, grp, reason FROM draws ORDER BY seq")
    assert found == [
        (0, 0, 0, 1, 0, None), (0, 1, 1, 2, None, "too long"), (0, 2, 2, 3, 1, None), (0, 3, 3, 4, 2, None),
        (0, 4, 4, 5, None, "too long"), (0, 5, 5, 6, 3, None), (1, 0, 0, 1, 4, None),
    ]  # fmt: skip
    assert rows(tmp_path / "run", "SELECT path, unit FROM files") == [(args.prompt_data, "line")]
    assert [json.loads(samples) for (samples,) in rows(tmp_path / "run", "SELECT samples FROM events LIMIT 2")] == [[0, 1], [2, 3]]


def test_a_trained_group_ends_with_each_samples_versions(args: Any, tmp_path: Path) -> None:
    source = tracked(args, tmp_path / "run")
    (group,) = source.get_samples(1)
    done(group, versions="35")
    group[1].status, group[1].metadata["failure"] = Status.FAILED, "EngineError: gone"
    source.trained(group, step=4)
    assert source.ledger.state(0) is State.TRAINED
    found = rows(tmp_path / "run", "SELECT sample, state, reason, oldest, newest FROM outcomes")
    assert found == [(0, "trained", None, 3, 5), (1, "failed", "EngineError: gone", 3, 5)]


def test_given_back_groups_are_kept_and_issued_again(args: Any, tmp_path: Path) -> None:
    source = tracked(args, tmp_path / "run")
    first, second = source.get_samples(2)
    source.add_samples([done(second), first])
    assert source.ledger.live == {0: State.KEPT, 1: State.KEPT}
    assert source.get_samples(2) == [second, first]
    assert rows(tmp_path / "run", "SELECT grp, state, reason FROM events WHERE seq > 5 ORDER BY seq") == [
        (1, "kept", "finished"), (0, "kept", "fresh"), (1, "issued", "again, finished"), (0, "issued", "again, fresh"),
    ]  # fmt: skip


def test_what_is_out_at_a_commit_is_handed_out_first_by_the_run_that_resumes(args: Any, tmp_path: Path) -> None:
    source = tracked(args, tmp_path / "run")
    groups = source.get_samples(3)
    untouched = [list(map(Sample.to_dict, group)) for group in groups]
    source.trained(done(groups[0]), step=0)
    source.trained(done(groups[1]), step=1)  # ahead of the commit of step 0
    commit = tmp_path / "commit"
    commit.mkdir()
    source.save(str(commit), step=0)
    source.trained(done(groups[2]), step=2)
    source.get_samples(2)
    source.close()
    again = tracked(args, tmp_path / "run", load=commit)
    assert again.ledger.live == {1: State.KEPT, 2: State.KEPT}
    got = again.get_samples(3)
    assert [list(map(Sample.to_dict, group)) for group in got[:2]] == untouched[1:]
    assert got[2][0].group_index == 3
    assert "in flight at the commit of step 0" in {row[0] for row in rows(tmp_path / "run", "SELECT reason FROM events")}


def test_a_commit_keeps_what_a_resumed_run_has_not_handed_out_yet(args: Any, tmp_path: Path) -> None:
    source = tracked(args, tmp_path / "run")
    source.get_samples(3)
    for commit in (tmp_path / "first", tmp_path / "second"):
        commit.mkdir()
        source.save(str(commit), step=0)
        source.close()
        source = tracked(args, tmp_path / "run", load=commit)
        assert [group[0].group_index for group in source.get_samples(1)] == [0]
    assert [group[0].group_index for group in source.get_samples(3)] == [1, 2, 3]


def test_a_partial_group_comes_back_from_a_commit_token_by_token(args: Any, tmp_path: Path) -> None:
    source = tracked(args, tmp_path / "run")
    (group,) = source.get_samples(1)
    done(group)
    group[0].status = Status.ABORTED
    source.add_samples([group])
    (out,) = source.get_samples(1)
    before = [sample.to_dict() for sample in out]
    out[0].append_response_tokens(tokens=[7], log_probs=[-0.1], weight_versions=["9"])
    commit = tmp_path / "commit"
    commit.mkdir()
    source.save(str(commit), step=0)
    source.close()
    (again,) = tracked(args, tmp_path / "run", load=commit).get_samples(1)
    assert [sample.to_dict() for sample in again] == before


def test_a_group_that_nobody_returns_counts_as_dropped_and_may_still_come(args: Any, tmp_path: Path) -> None:
    source = tracked(args, tmp_path / "run")
    (group,) = source.get_samples(1)
    for step in range(OVERDUE_STEPS + 1):
        source.begin_step(step, trained_through=step - 1)
        assert source.ledger.state(0) is State.ISSUED
    source.begin_step(OVERDUE_STEPS + 1, trained_through=OVERDUE_STEPS)
    assert source.ledger.state(0) is State.DROPPED
    source.trained(done(group), step=OVERDUE_STEPS + 1)
    assert source.ledger.state(0) is State.TRAINED


def test_a_group_that_is_given_back_after_it_counted_as_dropped_is_kept(args: Any, tmp_path: Path) -> None:
    source = tracked(args, tmp_path / "run")
    (group,) = source.get_samples(1)
    source.begin_step(OVERDUE_STEPS + 1, trained_through=OVERDUE_STEPS)
    assert source.ledger.state(0) is State.DROPPED
    source.add_samples([done(group)])
    assert source.ledger.live == {0: State.KEPT}
    assert source.get_samples(1) == [group]
    source.trained(group, step=OVERDUE_STEPS + 1)
    found = rows(tmp_path / "run", "SELECT state, reason FROM events ORDER BY seq")
    assert [state for state, _ in found] == ["issued", "dropped", "kept", "issued", "trained"]
    assert found[2][1] == "finished"


def test_what_the_buffer_gives_up_is_entered(args: Any, tmp_path: Path) -> None:
    args = make_args(
        hf_checkpoint=args.hf_checkpoint, prompt_data=args.prompt_data, n_samples_per_prompt=2, rollout_max_prompt_len=4,
        buffer_max_groups=1, buffer_overflow="drop",
    )  # fmt: skip
    source = tracked(args, tmp_path / "run")
    source.add_samples(source.get_samples(2))
    assert source.ledger.live == {0: State.KEPT}
    assert source.ledger.state(1) is State.DROPPED
    assert rows(tmp_path / "run", "SELECT sample, state, reason FROM outcomes") == [
        (number, "dropped", "the buffer was full (--buffer-max-groups 1)") for number in (2, 3)
    ]


def keep_even(args: Any, rollout_id: int, buffer: list[Any], num_samples: int) -> list[Any]:
    """A buffer filter: even groups in step 2, all others are thrown away."""
    assert rollout_id == 2
    taken = [group for group in buffer if group[0].group_index % 2 == 0][:num_samples]
    buffer.clear()
    return taken


def test_a_buffer_filter_chooses_and_what_it_throws_away_is_filtered(args: Any, tmp_path: Path) -> None:
    values = {"hf_checkpoint": args.hf_checkpoint, "prompt_data": args.prompt_data, "n_samples_per_prompt": 2, "rollout_max_prompt_len": 4}
    source = tracked(make_args(**values, buffer_filter_path=f"{__name__}.keep_even"), tmp_path / "run")
    source.add_samples(source.get_samples(4))
    source.begin_step(2, trained_through=1)
    assert [group[0].group_index for group in source.get_samples(3)] == [0, 2, 4]
    assert [source.ledger.state(group) for group in (1, 3)] == [State.FILTERED, State.FILTERED]


def test_samples_that_the_rollout_function_made_itself_are_followed_apart(args: Any, tmp_path: Path) -> None:
    source = tracked(args, tmp_path / "run")
    own = [Sample(group_index=0, index=9, rollout_id=9), Sample(rollout_id=4)]
    for step in (0, 1):  # the same ids again: they are not the data source's
        source.trained(own, step=step)
    (group,) = source.get_samples(1)
    source.trained(done(group), step=2)
    found = rows(tmp_path / "run", "SELECT grp, state, step FROM events WHERE state = 'trained' ORDER BY grp")
    assert found == [(-4, "trained", 1), (-3, "trained", 1), (-2, "trained", 0), (-1, "trained", 0), (0, "trained", 2)]


def test_training_twice_is_refused_naming_the_row(args: Any, tmp_path: Path) -> None:
    source = tracked(args, tmp_path / "run")
    _, second = source.get_samples(2)
    source.trained(done(second), step=0)
    with pytest.raises(DataError, match=r"group 1 \(.*prompts\.jsonl line 3\) was trained at step 0 and is to be trained again at step 1"):
        source.trained(second, step=1)


def test_segments_of_a_fan_out_have_their_parent_and_missing_samples_are_named() -> None:
    segments = [Sample(index=4, rollout_id=4), Sample(index=90, rollout_id=4, status=Status.FAILED), Sample(index=91, rollout_id=77)]
    ends = outcomes_of(segments, [4, 5], State.TRAINED)
    assert [(end.sample, end.segment, end.own, end.state) for end in ends] == [
        (4, 0, None, State.TRAINED),
        (4, 1, 90, State.FAILED),
        (None, 0, 91, State.TRAINED),
        (5, 0, None, State.DROPPED),
    ]


def test_samples_taken_out_of_the_loss_are_filtered_or_truncated() -> None:
    samples = [Sample(index=0, remove_sample=True), Sample(index=1, remove_sample=True, status=Status.TRUNCATED), Sample(index=2)]
    assert [end.state for end in outcomes_of(samples, [0, 1, 2], State.TRAINED)] == [State.FILTERED, State.TRUNCATED, State.TRAINED]


def test_a_commit_without_a_mark_or_with_a_torn_one_is_refused(args: Any, tmp_path: Path) -> None:
    source = tracked(args, tmp_path / "run")
    commit = tmp_path / "commit"
    commit.mkdir()
    source.save(str(commit), step=0)
    mark = commit / "ledger.json"
    mark.write_text(mark.read_text()[:30])
    with pytest.raises(CheckpointError, match="is torn"):
        tracked(args, tmp_path / "run", load=commit)
    mark.unlink()
    with pytest.raises(CheckpointError, match="no place in a ledger"):
        tracked(args, tmp_path / "run", load=commit)


def test_the_data_sources_own_attributes_are_there(args: Any, tmp_path: Path) -> None:
    source = tracked(args, tmp_path / "run")
    source.metadata["mine"] = 1
    assert (source.get_buffer_length(), len(source), source.metadata) == (0, 4, {"mine": 1})
    metrics = source.metrics()
    assert metrics["buffer/fresh_groups"] == 0.0
    assert metrics["rollout/dropped_prompts"] == 2.0
