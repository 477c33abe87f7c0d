"""One training run from a valid configuration: start everything side by side, loop, and leave nothing behind.

ray.init ─▶ engines, trainers, rollout manager (all at once) ─▶ router ─▶ loop ─▶ shut down in the opposite order
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import random
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vime.checkpoint import Commit, commit_of_step, latest_commit
from vime.cli.record import RunRecord
from vime.config import RunConfig
from vime.config.estimators import ESTIMATORS
from vime.errors import CheckpointError, ConfigError
from vime.hooks import check_all
from vime.loop import run_loop
from vime.observability.memory import MemoryMonitor
from vime.observability.plot import plot_rewards
from vime.observability.status import duration
from vime.ray.actor_group import RayTrainGroup
from vime.ray.cluster import Cluster
from vime.ray.critic_group import ActorCriticGroup
from vime.ray.engine_group import EngineGroup
from vime.ray.placement_group import create_placement_groups
from vime.ray.rollout import RolloutClient
from vime.ray.supervisor import Supervisor
from vime.ray.turns import Turns
from vime.rollout.check import check_prompt_files
from vime.types import WeightSyncReport

__all__ = ["train"]

PROBE_LENGTH = 32  # tokens of the weight-sync proof's prompt


def train(config: RunConfig) -> None:
    """Run to the end. Raises VimeError; whatever happens, no process of the run is left."""
    begun = time.monotonic()
    check_all(config)
    check_prompt_files(config.args)
    commit = find_start(config)
    log_dir = run_folder(config)
    with locked_folders(config, log_dir):
        _run(config, commit, log_dir, begun)


def _run(config: RunConfig, commit: Commit | None, log_dir: Path, begun: float) -> None:
    if commit is not None and _same_run(config, commit) and 0 < (config.data.num_rollout or 0) <= commit.rollout_id + 1:
        print(f"nothing to do: all {config.data.num_rollout} steps are done and saved in {commit.path}. Raise --num-rollout to go on.")
        return
    memory = MemoryMonitor()
    memory.start()
    try:
        with Cluster(config), _parts(config, log_dir, commit) as (rollout, trainer):
            first, total = _steps(config, rollout.num_prompts, commit)
            record = RunRecord(config, log_dir, first_step=first, num_steps=total)
            for engines in rollout.groups:
                engines.say = record.status.say
            record.status.say(f"ready after {duration(time.monotonic() - begun)}; steps {first + 1} to {total}; logs in {log_dir}")
            try:
                with record.commit_kept():
                    run_loop(first, total, rollout, trainer, record)
            finally:
                record.close()
            memory.sample()
    finally:
        memory.stop()
    curve = log_dir / "reward.png"
    try:
        plotted = plot_rewards(log_dir / "metrics.jsonl", curve)
    except OSError as error:  # all that was trained is saved: no reason to fail
        plotted = False
        record.status.say(f"the curve {curve} could not be written: {error}")
    record.status.say(
        f"done in {duration(time.monotonic() - begun)}; peak memory {memory.peak_bytes / 2**30:.2f} GiB resident "
        f"({memory.peak_processes} processes); metrics in {log_dir / 'metrics.jsonl'}" + (f"; curve in {curve}" if plotted else "")
    )


@contextlib.contextmanager
def locked_folders(config: RunConfig, log_dir: Path) -> Iterator[None]:
    """Hold the folders that the run writes to, --save (made here) and `log_dir`. Raises ConfigError: another run has one of them."""
    folders = {log_dir.resolve(): "--log-dir"}
    if config.checkpoint.save is not None:
        save = Path(config.checkpoint.save)
        _make_writable(save)
        folders[save.resolve()] = "--save"
    with contextlib.ExitStack() as stack:
        for folder, flag in sorted(folders.items()):  # in one order: of two runs that want both, one gets both
            stack.enter_context(_locked(folder, flag))
        yield


@contextlib.contextmanager
def _locked(folder: Path, flag: str) -> Iterator[None]:
    """Hold the folder of `flag`: two runs in it would overwrite each other. The kernel lets go when we die."""
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise ConfigError(
                f"the folder '{folder}' is in use by another run (process {file.read().strip()}): wait for it, or give another {flag}."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def find_start(config: RunConfig) -> Commit | None:
    """The commit to resume from: that of --save, else that of --load (which must have one)."""
    save, load = config.checkpoint.save, config.checkpoint.load
    if save is not None and (commit := latest_commit(Path(save))) is not None:
        return commit
    if load is None:
        return None
    if config.checkpoint.ckpt_step is not None:
        return commit_of_step(Path(load), config.checkpoint.ckpt_step)
    if (Path(load) / "metadata.json").is_file():  # Megatron's checkpoint by itself: weights, of no step
        return Commit(path=Path(load), rollout_id=-1, weight_version=0)
    commit = latest_commit(Path(load))
    if commit is None:
        raise CheckpointError(
            f"--load '{load}' holds no commit. Give the --save folder of a run that has saved, or what `vime convert --to megatron` "
            "wrote, or leave --load out."
        )
    return commit


def run_folder(config: RunConfig) -> Path:
    """Where metrics and logs go: --log-dir, --save, or a temporary folder."""
    chosen = config.logging.log_dir or config.checkpoint.save
    folder = Path(chosen) if chosen else Path(tempfile.mkdtemp(prefix="vime-run-"))
    _make_writable(folder)
    return folder


def _make_writable(folder: Path) -> None:
    """Make the folder. Raises ConfigError when nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"the run's folder '{folder}' cannot be written: {error.strerror}. Give another --save or --log-dir.") from error


class _TrainerWithProbe:
    """The train group, with the run's fixed probe prompt filled in, the engines told of every weight sync, and turns taken."""

    def __init__(self, group: RayTrainGroup, engines: EngineGroup | None, turns: Turns, probe: list[int], run_id: str) -> None:
        self._group, self._engines, self._turns, self._probe, self._run_id = group, engines, turns, probe, run_id
        if engines is not None:
            engines.resend_through(lambda receivers: group.resend_weights(receivers, probe, run_id))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def train(self, batch_refs: list[Any]) -> dict[str, float]:
        self._turns.trainer()
        return self._group.train(batch_refs)

    def update_weights(self, version: int, engines: list[Any]) -> WeightSyncReport:
        with self._turns.sync():
            report = self._group.update_weights(version, engines, self._probe, self._run_id)
        if self._engines is not None:
            self._engines.synced(report, engines)
        return report


@contextlib.contextmanager
def _parts(config: RunConfig, log_dir: Path, commit: Commit | None) -> Iterator[tuple[RolloutClient, _TrainerWithProbe | None]]:
    """Engines, rollout manager and trainers, started side by side and ended whatever happens."""
    run_id = uuid.uuid4().hex[:12]
    logs = log_dir / "logs"
    supervisor = Supervisor()
    placement = create_placement_groups(config)
    own = commit if commit is not None and _same_run(config, commit) else None  # else another run's weights and optimizer
    with contextlib.ExitStack() as stack:
        stack.callback(placement.remove)
        rollout = RolloutClient.launch(config, supervisor, placement, log_dir, logs, run_id)
        stack.callback(rollout.shutdown)
        group = turns = None
        if config.cluster.colocate:  # an engine measures the GPU's free memory as it starts: the trainer comes after it
            rollout.ready(own.rollout if own else None)
        if not config.debug.debug_rollout_only:
            if config.data.num_rollout is None:  # the learning-rate schedule needs to know how far it is
                total = _steps(config, rollout.prompts(own.rollout if own else None), own)[1]
                config = dataclasses.replace(config, data=dataclasses.replace(config.data, num_rollout=total))
            kind = ActorCriticGroup if ESTIMATORS[config.algorithm.advantage_estimator].critic else RayTrainGroup
            group = kind(config, placement, supervisor, logs)
            stack.callback(group.shutdown)
            turns = Turns(config, group, rollout.groups[0] if rollout.groups else None)
            turns.trainer()
            group.start(commit.trainer if commit else None, resume=own is not None)
        if not config.cluster.colocate:
            rollout.ready(own.rollout if own else None)
        if group is not None:
            group.ready()
        engines = rollout.groups[0] if rollout.groups else None
        yield rollout, _TrainerWithProbe(group, engines, turns, _probe(config), run_id) if group is not None and turns else None


def _same_run(config: RunConfig, commit: Commit) -> bool:
    """Whether `commit` is this run's own, so that step and data cursor go on; another run's gives only weights and optimizer."""
    return config.checkpoint.save is not None and commit.rollout_id >= 0 and commit.path.parent == Path(config.checkpoint.save)


def _steps(config: RunConfig, num_prompts: int, commit: Commit | None) -> tuple[int, int]:
    """(first step, number of steps)."""
    data = config.data
    total = data.num_rollout
    if total is None:
        total = (data.num_epoch or 0) * num_prompts // (data.rollout_batch_size or 1)
        if total == 0:
            raise ConfigError(
                f"--num-epoch {data.num_epoch} over {num_prompts} prompts makes no step of --rollout-batch-size {data.rollout_batch_size}."
            )
    first = commit.rollout_id + 1 if commit is not None and _same_run(config, commit) else 0
    return first, total


def _probe(config: RunConfig) -> list[int]:
    """The fixed prompt of the weight-sync proof: pseudo-random ids below the vocabulary's size, the same in every run."""
    assert config.model.hf_checkpoint is not None
    model = json.loads((Path(config.model.hf_checkpoint) / "config.json").read_text())
    model = model.get("text_config", model)  # of a model for images
    longest = config.rollout.rollout_max_context_len or int(model.get("max_position_embeddings", PROBE_LENGTH))
    length = min(PROBE_LENGTH, longest // 2)
    generator = random.Random(20260101)
    return [generator.randrange(int(model["vocab_size"])) for _ in range(length)]
