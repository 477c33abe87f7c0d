"""The life of an engine in the driver's eyes: who is routed to, when, and what ends the run. The engines are small actors."""

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from vime.backends.weight_transfer.control import EngineEndpoint
from vime.config import RunConfig
from vime.config.sections import ClusterConfig, FaultToleranceConfig
from vime.errors import DeadlineError, EngineError, PeerError
from vime.ray import engine_group
from vime.ray.cluster import Cluster
from vime.ray.engine_group import MOST_REPLACEMENTS, EngineGroup
from vime.ray.process import WatchedActor
from vime.ray.rollout import RolloutClient
from vime.ray.supervisor import Supervisor
from vime.types import WeightSyncReport

pytestmark = pytest.mark.integration


class Engine(WatchedActor):
    """Comes up at once, at an address of its own, unless the folder of its log holds a file "broken"."""

    def __init__(self, config, index, name, log, run_id):
        super().__init__(log)
        self._name, self._broken = name, (Path(log).parent / "broken").exists()

    def start(self):
        if self._broken:
            raise EngineError("no memory")
        return EngineEndpoint(name=self._name, url=f"http://127.0.0.1:{os.getpid()}", secret="secret")

    def stop(self):
        self._stopped.set()


@ray.remote(num_cpus=0)
class Manager:
    """What is in flight is finished once somebody has opened the pipe `gate` for writing."""

    def __init__(self, gate):
        self._gate = gate

    def before_sync(self):
        Path(self._gate).read_bytes()

    def weights_sent(self, version):
        Path(f"{self._gate}.sent").write_text(str(version))


@ray.remote(num_cpus=0)
def answer(value, gate):
    """`value`, once somebody has opened the pipe `gate` for writing."""
    if gate is not None:
        Path(gate).read_bytes()
    return value


@pytest.fixture(scope="module", autouse=True)
def cluster():
    sys.path.insert(0, str(Path(__file__).parent))
    with Cluster(RunConfig()):
        yield


class Run:
    """A group of two engines that serve, and what was done with them."""

    def __init__(self, folder, tolerant=True):
        config = RunConfig(cluster=ClusterConfig(rollout_num_gpus=2), fault_tolerance=FaultToleranceConfig(use_fault_tolerance=tolerant))
        self.folder, self.supervisor, self.routed, self.said, self.reports = folder, Supervisor(), [], [], []
        self.gate = None
        placement = SimpleNamespace(engine=lambda index: "DEFAULT")
        self.group = EngineGroup(config, config.models[0], self.supervisor, placement, folder, "tests")
        self.group.say = self.said.append
        endpoints = self.supervisor.get(self.group.starts(), names=self.group.names, phase="start", deadline=120.0)
        self.group.serve(endpoints, lambda model, now: self.routed.append([endpoint.url for endpoint in now]))
        self.group.resend_through(self.resend)
        self.first = self.urls(endpoints)

    def urls(self, endpoints):
        return [endpoint.url for endpoint in endpoints]

    def resend(self, endpoints):
        """What the trainer answers: the next of `reports`, which may be None."""
        report = self.reports.pop(0)
        return answer.remote(report, self.gate)

    def sync(self, version, lost=()):
        receivers = self.group.receivers()
        report = WeightSyncReport(version=version, num_bytes=0, seconds=0.0, num_tensors=0, lost=dict.fromkeys(lost, "it hung"))
        self.group.synced(report, receivers)
        return self.urls(receivers)

    def kill(self, number):
        os.kill(int(self.first[number].rpartition(":")[2]), signal.SIGKILL)

    def wait(self, condition):
        self.supervisor.wait_for(condition, peer="the group", phase="test", deadline=120.0, progress=lambda: f"{self.said} {self.routed}")


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_group, "VLLMEngine", Engine)
    made = []

    def build(**options):
        made.append(Run(tmp_path, **options))
        return made[-1]

    yield build
    for run in made:
        run.group.kill()


def report(version, **more):
    return WeightSyncReport(version=version, num_bytes=0, seconds=0.0, num_tensors=0, **more)


def test_an_engine_that_dies_leaves_the_router_and_its_replacement_joins_after_it_was_sent_what_the_others_hold(start):
    run = start()
    assert run.sync(3) == run.first
    run.reports = [report(3)]
    run.kill(0)
    run.wait(lambda: len(run.routed) == 2)
    assert run.routed[0] == run.first[1:]
    assert run.routed[1][1] == run.first[1]
    assert run.routed[1][0] not in run.first
    assert run.said[0].startswith("engine 0 is replaced: engine 0 died")
    assert run.said[1] == "engine 0 replaced, and serving weight version 3"


def test_when_the_trainer_has_moved_on_the_replacement_joins_at_the_next_sync(start):
    run = start()
    run.sync(3)
    run.reports = [None]
    run.kill(1)
    run.wait(lambda: run.group._declined)
    assert run.routed == [run.first[:1]]
    received = run.sync(4)
    assert received[0] == run.first[0]
    assert run.routed == [run.first[:1], received]


def test_a_sync_that_waits_for_what_is_in_flight_goes_ahead_when_the_last_engine_dies(start, tmp_path):
    run, gate = start(), tmp_path / "flight"
    os.mkfifo(gate)
    run.sync(3)
    run.reports = [None, None]
    client = RolloutClient(RunConfig(), run.supervisor, Manager.remote(str(gate)), [run.group])
    run.kill(0)
    run.kill(1)
    client.before_sync()  # both serve still, as far as the driver knows
    assert not run.group.serves
    assert len(run.sync(4)) > 0
    assert run.group.serves
    gate.write_bytes(b"")
    client.weights_sent(4)
    assert (tmp_path / "flight.sent").read_text() == "4"


def test_a_sync_waits_for_what_is_in_flight_while_an_engine_serves(start, tmp_path):
    run, gate = start(), tmp_path / "flight"
    os.mkfifo(gate)
    run.sync(3)
    manager = Manager.remote(str(gate))
    client = RolloutClient(RunConfig(), run.supervisor, manager, [run.group])
    opened = []
    run.supervisor.on_look(lambda: opened or opened.append(gate.open("w").close()))
    client.before_sync()
    assert opened
    client.weights_sent(4)


def test_a_resend_that_a_sync_overtook_does_not_let_the_engine_serve(start, tmp_path):
    run = start()
    run.sync(3)
    run.reports, run.gate = [report(3), report(4)], tmp_path / "gate"
    os.mkfifo(run.gate)
    run.kill(0)
    run.wait(lambda: len(run.reports) == 1)  # the resend of version 3 has begun, and waits at the gate
    assert run.sync(4) == run.first[1:]
    gate, run.gate = run.gate, None
    gate.write_bytes(b"")
    run.wait(lambda: len(run.routed) == 2)
    assert run.said[-1] == "engine 0 replaced, and serving weight version 4"


def test_an_engine_that_a_sync_lost_is_replaced(start):
    run = start()
    run.sync(3, lost=run.first[1:])
    assert run.routed == [run.first[:1]]
    run.reports = [report(3)]
    run.wait(lambda: len(run.routed) == 2)
    assert "engine 1 is replaced: lost in the sync of weight version 3: it hung" in run.said


def test_a_replacement_that_does_not_start_is_tried_again_and_then_ends_the_run(start, tmp_path):
    run = start()
    run.sync(3)
    (tmp_path / "broken").touch()
    run.kill(0)
    with pytest.raises(EngineError, match=f"engine 0 failed {MOST_REPLACEMENTS + 1} times since the last weight sync") as caught:
        run.wait(lambda: False)
    assert "no memory" in str(caught.value)


def test_a_sync_waits_for_an_engine_when_none_is_left(start):
    run = start()
    run.sync(3)
    run.reports = [None, None]
    run.kill(0)
    run.kill(1)
    run.wait(lambda: not run.group.serves)
    received = run.group.receivers()
    assert received
    assert not set(run.urls(received)) & set(run.first)


def test_without_fault_tolerance_an_engine_that_dies_ends_the_wait(start):
    run = start(tolerant=False)
    run.kill(0)
    with pytest.raises(PeerError, match="engine 0 died"):
        run.wait(lambda: False)


def test_a_wait_for_something_that_does_not_come_says_what_it_saw_last():
    supervisor = Supervisor()
    watched = answer.remote(None, None)
    supervisor.watch("somebody", watched)
    supervisor.survive("somebody", lambda error: None)
    with pytest.raises(DeadlineError, match=r"the peer did not finish 'a phase' within 1 s \(last progress: none seen\)"):
        supervisor.wait_for(lambda: False, peer="the peer", phase="a phase", deadline=1.0, progress=lambda: "none seen")
