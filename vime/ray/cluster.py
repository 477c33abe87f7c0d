"""The Ray cluster of a run: joined when RAY_ADDRESS is set, otherwise started here and ended here."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import ray

from vime.config import RunConfig
from vime.errors import ConfigError, PeerError, ResourceError
from vime.ray.reaper import processes_with

__all__ = ["Cluster"]

OBJECT_STORE_BYTES = 256 * 1024**2
TEMP_PREFIX = "vime-ray-"
MARK = "VIME_RUN"
SHUTDOWN_PATIENCE = 20.0  # seconds


class Cluster:
    """Context manager around ray.init and ray.shutdown. Whatever happens inside, no process of ours outlives it."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._temp: Path | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self.address = os.environ.get("RAY_ADDRESS")

    def __enter__(self) -> Cluster:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "0")  # it would kill an engine's supervisor before the engine
        path = [
            entry for entry in sys.path if entry and os.path.isdir(entry) and "site-packages" not in entry and "lib/python" not in entry
        ]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path + os.environ.get("PYTHONPATH", "").split(os.pathsep))).strip(
            os.pathsep
        )
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "ignore_reinit_error": False}
        if self.address:
            names = ("PYTHONPATH", "RAY_kill_child_processes_on_worker_exit")
            options["runtime_env"] = {"env_vars": {name: os.environ[name] for name in names}}  # its workers do not inherit from us
            _init(f"the Ray cluster at RAY_ADDRESS={self.address}", address=self.address, **options)
            return self
        _remove_stale_temp()
        check_cores(self._config)
        self._temp = _temp_folder()
        os.environ[MARK] = self._temp.name  # in the environment of every process of the run
        command = [sys.executable, "-S", "-I", str(Path(__file__).with_name("reaper.py")), str(os.getpid()), f"{MARK}={self._temp.name}"]
        self._reaper = subprocess.Popen([*command, str(self._temp)], stdin=subprocess.DEVNULL, start_new_session=True)
        _raise_file_limit()
        try:
            _init(
                "a local Ray cluster",
                address="local",
                num_cpus=len(os.sched_getaffinity(0)),
                _node_ip_address="127.0.0.1",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(self._temp),
                **options,
            )
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        children = psutil.Process().children(recursive=True) if not self.address else []
        patience = threading.Timer(SHUTDOWN_PATIENCE, _kill, [children])  # ray.shutdown waits for ever for a raylet that is stuck
        patience.daemon = True
        patience.start()
        ray.shutdown()
        patience.cancel()
        if self.address or self._temp is None:
            return
        end = time.monotonic() + SHUTDOWN_PATIENCE
        while (left := self._left()) and time.monotonic() < end:
            time.sleep(0.1)  # processes that were told to end are ending; most are no children of ours
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._temp, ignore_errors=True)

    def _left(self) -> list[int]:
        """Processes of the run that still live, but for the reaper, which ends after us."""
        assert self._temp is not None
        reaper = self._reaper.pid if self._reaper is not None else None
        return [pid for pid in processes_with(f"{MARK}={self._temp.name}".encode()) if pid not in (os.getpid(), reaper)]


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def check_cores(config: RunConfig) -> None:
    """Trainers and engines take turns, so each kind may use every core, but no more. Raises ConfigError before any work."""
    cores = len(os.sched_getaffinity(0))
    trainers = 0 if config.debug.debug_rollout_only else config.actor_world_size
    if trainers > cores:
        raise ConfigError(
            f"{trainers} trainer processes asked for (--actor-num-gpus-per-node), this machine has {cores} cores: ask for at most {cores}."
        )
    if config.num_own_engines > cores:
        raise ConfigError(
            f"{config.num_own_engines} engines asked for (--rollout-num-gpus, --vllm-config), "
            f"this machine has {cores} cores: ask for at most {cores}."
        )


def _init(what: str, **options: Any) -> None:
    try:
        ray.init(**options)
    except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
        cure = "If it asks for a token, set its RAY_AUTH_TOKEN here, too; unset RAY_ADDRESS to let the run start a cluster of its own."
        raise PeerError(f"{what} cannot be reached or started: {error}. {cure}") from error
    except OSError as error:
        raise ResourceError(f"{what} cannot be started: {error}.") from error


def _raise_file_limit() -> None:
    """Ray opens many files; take as many as are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 65536:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(65536, hard), hard))


def _temp_folder() -> Path:
    """A folder for Ray's files, short enough for its socket paths."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix=f"{TEMP_PREFIX}{os.getpid()}-", dir=base if len(base) < 20 else "/tmp"))


def _remove_stale_temp() -> None:
    """Remove the folders of local clusters whose driver was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{TEMP_PREFIX}*"):
        pid = folder.name.removeprefix(TEMP_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
