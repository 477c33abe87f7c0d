"""Sender or receiver is killed at each boundary of a weight update: who survives holds one version or the other, never a mix."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.integration.weight_transfer.receiver import SECRET, Fault, serve
from vime.backends.megatron_utils.update_weight.sync import WeightUpdater
from vime.backends.weight_transfer.control import EngineControl, EngineEndpoint
from vime.config.sections import WeightUpdateConfig
from vime.errors import EngineError, PeerError
from vime.types import WeightSyncReport

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NAMES = [f"layer.{number}" for number in range(7)]
BUCKETS = 3  # of 3, 3 and 1 tensors
PROBE = [0, *range(len(NAMES))]
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.integration.weight_transfer.receiver", "vime.backends.megatron_utils.update_weight.sync"])

CALLS = [
    ("/pause", 1),
    ("/reset_prefix_cache", 1),
    ("/start_weight_update", 1),
    *(("/update_weights", number) for number in range(1, BUCKETS + 1)),
    ("/collective_rpc", 1),
    ("/finish_weight_update", 1),
    ("/resume", 1),
    ("/inference/v1/generate", 1),
]
BOUNDARIES = [(path, count, moment) for path, count in CALLS for moment in ("before", "after")]
BOUNDARIES += [("/update_weights", number, "half way") for number in range(1, BUCKETS + 1)]


class Process:
    """A receiver, and the client to look at it."""

    def __init__(self, name: str, fault: Fault | None) -> None:
        ours, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=serve, args=(fault, theirs), daemon=True)
        self.process.start()
        assert ours.poll(60.0)
        self.endpoint = EngineEndpoint(name=name, url=f"http://127.0.0.1:{ours.recv()}", secret=SECRET)
        self.control = EngineControl.of(self.endpoint)

    def state(self) -> dict[str, Any]:
        return self.control.call("GET", "/state")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def receivers() -> Iterator[Callable[[Fault | None], list[Process]]]:
    """Makes two receivers; the second has the fault. Both have version 1, sent without a fault."""
    made: list[Process] = []

    def make(fault: Fault | None) -> list[Process]:
        made.extend([Process("engine 0", None), Process("engine 1", fault)])
        send(made, 1)
        return made

    yield make
    for receiver in made:
        receiver.kill()


def value(version: int, number: int) -> float:
    """What tensor `number` is filled with under a version."""
    return -float(version) - number / 16


def send(
    receivers: list[Process], version: int, step_seconds: float | None = None, kind: type[WeightUpdater] = WeightUpdater
) -> WeightSyncReport:
    """One whole update."""
    tensors = [(name, torch.full((5, 3), value(version, number))) for number, name in enumerate(NAMES)]
    updater = kind(WeightUpdateConfig(update_weight_deadline=60.0), run_id="transaction", step_seconds=step_seconds)
    buckets = (list(bucket) for bucket in itertools.batched(tensors, 3))
    log_probs = [value(version, number) for number in range(len(NAMES))]
    return updater.update([receiver.endpoint for receiver in receivers], version, buckets, PROBE, lambda _: log_probs)


def assert_one_version(receiver: Process) -> str:
    """The receiver serves and holds the whole of the version that it names, or it cannot be made to serve. Returns "v1", "v2" or "none"."""
    state = receiver.state()
    whole = [version for version in (1, 2) if state["values"] == {name: value(version, n) for n, name in enumerate(NAMES)}]
    if state["paused"]:
        try:
            receiver.control.resume()
        except EngineError as error:
            if "answered 409: the weights are half loaded" in str(error):
                return "none"
            raise
    assert whole == [int(state["version"])]
    return f"v{whole[0]}"


def second_time(path: str, count: int, moment: str, number: int = signal.SIGKILL) -> Fault:
    """The fault in the second update; the first one has called everything before."""
    return Fault(path=path, count=count + (BUCKETS if path == "/update_weights" else 1), moment=moment, signal=number)


@pytest.mark.parametrize(("path", "count", "moment"), BOUNDARIES)
def test_a_receiver_that_dies_is_left_behind_and_the_other_gets_the_new_version(receivers: Any, path: str, count: int, moment: str) -> None:
    both = receivers(second_time(path, count, moment))
    report = send(both, 2, step_seconds=30.0)
    assert list(report.lost) == [both[1].endpoint.url]
    assert assert_one_version(both[0]) == "v2"
    both[1].process.join(30.0)
    assert both[1].process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("path", "count", "moment"), [("/pause", 1, "before"), ("/update_weights", 2, "half way"), ("/finish_weight_update", 1, "after")]
)
def test_a_receiver_that_hangs_is_left_behind_after_the_time_for_a_step(receivers: Any, path: str, count: int, moment: str) -> None:
    both = receivers(second_time(path, count, moment, signal.SIGSTOP))
    report = send(both, 2, step_seconds=2.0)
    assert list(report.lost) == [both[1].endpoint.url]
    assert "within 2 s" in report.lost[both[1].endpoint.url]
    assert assert_one_version(both[0]) == "v2"
    os.kill(both[1].process.pid, signal.SIGCONT)  # it goes on where it stood, and is no mix for that
    assert assert_one_version(both[1]) in ("v1", "v2", "none")


@pytest.mark.parametrize(("path", "count", "moment"), BOUNDARIES)
def test_without_fault_tolerance_the_update_fails_and_the_other_is_no_mix(receivers: Any, path: str, count: int, moment: str) -> None:
    both = receivers(second_time(path, count, moment))
    with pytest.raises(PeerError, match=r"Weight update 2 failed .*engine 1 at .* cannot be reached"):
        send(both, 2)
    found = assert_one_version(both[0])
    before, after = CALLS.index(("/start_weight_update", 1)), CALLS.index(("/finish_weight_update", 1))
    place = CALLS.index((path, count))
    assert found in (
        {"v1"}
        if place < before
        else {"v1", "none"}
        if place == before
        else {"none"}
        if place < after
        else {"none", "v2"}
        if place == after
        else {"v2"}
    )
    assert send(both[:1], 2).lost == {}  # a whole update mends it
    assert assert_one_version(both[0]) == "v2"


def test_when_all_receivers_die_the_report_says_so(receivers: Any) -> None:
    both = receivers(second_time("/update_weights", 2, "half way"))
    report = send(both[1:], 2, step_seconds=30.0)
    assert list(report.lost) == [both[1].endpoint.url]
    assert report.proof_max_abs_diff != report.proof_max_abs_diff  # not a number: nothing was proven
    assert assert_one_version(both[0]) == "v1"


def killed_sender(endpoints: list[EngineEndpoint], path: str, count: int, moment: str) -> None:
    """Send version 2, and die at the `count`-th call of `path`: before it is made, or after its answer."""
    calls = itertools.count(1)
    ask = EngineControl._once

    def counted(self: EngineControl, method: str, target: str, body: Any, seconds: float) -> tuple[int, bytes]:
        here = target.partition("?")[0] == path and self.name == "engine 1" and next(calls) == count
        if here and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        found = ask(self, method, target, body, seconds)
        if here:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    EngineControl._once = counted  # type: ignore[method-assign]
    tensors = [(name, torch.full((5, 3), value(2, number))) for number, name in enumerate(NAMES)]
    buckets = (list(bucket) for bucket in itertools.batched(tensors, 3))
    log_probs = [value(2, number) for number in range(len(NAMES))]
    WeightUpdater(WeightUpdateConfig(), run_id="transaction").update(endpoints, 2, buckets, PROBE, lambda _: log_probs)


@pytest.mark.parametrize(("path", "count", "moment"), [boundary for boundary in BOUNDARIES if boundary[2] != "half way"])
def test_a_sender_that_dies_leaves_no_mix_and_the_next_update_mends_it(receivers: Any, path: str, count: int, moment: str) -> None:
    both = receivers(None)
    sender = PROCESSES.Process(target=killed_sender, args=([receiver.endpoint for receiver in both], path, count, moment))
    sender.start()
    sender.join(60.0)
    assert sender.exitcode == -signal.SIGKILL
    assert {assert_one_version(receiver) for receiver in both} <= {"v1", "v2", "none"}
    assert send(both, 2).lost == {}
    assert [assert_one_version(receiver) for receiver in both] == ["v2", "v2"]
