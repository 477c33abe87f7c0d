"""A wait ends with the right error the moment a peer dies, raises, or is late."""

import os
import signal
import sys
from pathlib import Path

import pytest
import ray

from vime.config import RunConfig
from vime.config.sections import ClusterConfig
from vime.errors import DataError, DeadlineError, EngineError, PeerError, TrainerError
from vime.ray.actor_group import environment_options
from vime.ray.cluster import Cluster
from vime.ray.process import WatchedActor, watched_actor
from vime.ray.supervisor import Supervisor

pytestmark = pytest.mark.integration


class Worker(WatchedActor):
    def work(self, seconds=0.0):
        self._stopped.wait(seconds)
        return seconds

    def variable(self, name):
        return os.environ.get(name)

    def fail(self, kind):
        print("about to fail", flush=True)
        raise {"vime": DataError("row 7 is bad"), "bug": KeyError("oops"), "disk": OSError(28, "No space left on device")}[kind]


class Sick(Worker):
    """Its child dies at once."""

    def watch(self):
        raise EngineError("engine 0 died (exit -9)")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    sys.path.insert(0, str(Path(__file__).parent))
    with Cluster(RunConfig()):
        yield


def launch(cls, tmp_path, supervisor, name="worker 0", **options):
    log = tmp_path / "worker.log"
    actor = watched_actor(cls).options(num_cpus=0, **options).remote(str(log))
    supervisor.watch(name, actor.watch.options(concurrency_group="watch").remote(), log)
    return actor


def get(supervisor, ref, deadline=60.0):
    return supervisor.get([ref], names=["worker 0"], phase="work", deadline=deadline)[0]


def test_trainers_get_the_variables_of_the_command_line_over_what_they_inherit(tmp_path):
    supervisor = Supervisor()
    config = RunConfig(cluster=ClusterConfig(train_env_vars={"VIME_TEST": "from the flag"}))
    worker = launch(Worker, tmp_path, supervisor, **environment_options(config))
    assert get(supervisor, worker.variable.remote("VIME_TEST")) == "from the flag"
    assert get(supervisor, worker.variable.remote("PATH")) == os.environ["PATH"]


def test_a_value_arrives(tmp_path):
    supervisor = Supervisor()
    assert get(supervisor, launch(Worker, tmp_path, supervisor).work.remote(0.0)) == 0.0


def test_a_killed_actor_ends_the_wait_naming_it_and_its_log(tmp_path):
    supervisor = Supervisor()
    actor = launch(Worker, tmp_path, supervisor)
    os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)
    with pytest.raises(PeerError, match="worker 0 died during 'work'"):
        get(supervisor, actor.work.remote(50.0))


def test_a_bystander_that_dies_ends_the_wait_for_another(tmp_path):
    supervisor = Supervisor()
    busy = launch(Worker, tmp_path, supervisor)
    launch(Sick, tmp_path, supervisor, name="engine 0")
    with pytest.raises(EngineError, match=r"engine 0 died \(exit -9\)"):
        get(supervisor, busy.work.remote(50.0))


def test_our_own_error_comes_back_as_it_is(tmp_path):
    supervisor = Supervisor()
    with pytest.raises(DataError, match="row 7 is bad"):
        get(supervisor, launch(Worker, tmp_path, supervisor).fail.remote("vime"))


def test_an_operating_system_error_keeps_its_kind(tmp_path):
    supervisor = Supervisor()
    with pytest.raises(OSError, match="No space left"):
        get(supervisor, launch(Worker, tmp_path, supervisor).fail.remote("disk"))


def test_a_bug_names_the_peer_and_its_log(tmp_path):
    supervisor = Supervisor()
    with pytest.raises(TrainerError) as error:
        get(supervisor, launch(Worker, tmp_path, supervisor).fail.remote("bug"))
    assert "worker 0 failed in 'work'" in str(error.value)
    assert "oops" in str(error.value)
    assert str(tmp_path / "worker.log") in str(error.value)


def test_a_late_peer_is_named_with_phase_and_progress(tmp_path):
    supervisor = Supervisor()
    with pytest.raises(DeadlineError, match=r"worker 0 did not finish 'work' within 1 s \(last progress: 0 of 1 answered\)"):
        get(supervisor, launch(Worker, tmp_path, supervisor).work.remote(50.0), deadline=1.0)


def test_the_output_of_an_actor_is_in_its_log(tmp_path):
    supervisor = Supervisor()
    with pytest.raises(DataError):
        get(supervisor, launch(Worker, tmp_path, supervisor).fail.remote("vime"))
    assert "about to fail" in (tmp_path / "worker.log").read_text()
