"""Trainer processes without Ray, for one step: started side by side, watched, ended whatever happens.

The parent serves the store where the ranks meet. What a rank raises is raised here; a rank that dies, or does not end in time, ends
the others.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, process
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vime.config import RunConfig
from vime.errors import DeadlineError, TrainerError, VimeError
from vime.types import TrainBatch

__all__ = ["Task", "train_once"]

LOOPBACK = "127.0.0.1"
TAIL = 2000  # characters of a dead rank's log that are shown
END_SECONDS = 10.0  # for a rank that was told to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one rank is to do: build its trainer, load `state`, train on its data-parallel share of the step."""

    config: RunConfig
    batches: Sequence[TrainBatch]  # one a data-parallel rank
    values: Sequence[Sequence[npt.NDArray[np.float32]]] | None  # the critic's, [R] of each sample of each batch
    state: str | None  # a saved trainer state; None = the start weights
    resume: bool


def train_once(task: Task, logs: Path) -> str | None:
    """Train in `task.config.actor_world_size` processes; returns what the trainer said when loss or gradient were not finite, else None.

    Raises VimeError: a rank's own, TrainerError for one that died, DeadlineError after --actor-deadline.
    """
    world, context = task.config.actor_world_size, multiprocessing.get_context("spawn")
    with _store() as port:
        ranks: dict[connection.Connection, process.BaseProcess] = {}
        names: dict[connection.Connection, int] = {}
        try:
            for rank in range(world):
                receiver, sender = context.Pipe(duplex=False)
                started = context.Process(
                    target=_rank, args=(task, rank, world, port, str(logs / f"trainer_{rank}.log"), sender), daemon=True
                )
                started.start()
                sender.close()
                ranks[receiver], names[receiver] = started, rank
            return _results(ranks, names, task.config.cluster.actor_deadline, logs)
        finally:
            for child in ranks.values():
                child.kill()
            for child in ranks.values():
                child.join(END_SECONDS)


@contextlib.contextmanager
def _store() -> Iterator[int]:
    """The port of a store on the loopback interface."""
    from torch.distributed import TCPStore

    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    yield port
    del store


def _results(
    ranks: dict[connection.Connection, process.BaseProcess], names: dict[connection.Connection, int], deadline: float, logs: Path
) -> str | None:
    waiting, end, said = set(ranks), time.monotonic() + deadline, None
    while waiting:
        ready = connection.wait(waiting, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            late = sorted(names[one] for one in waiting)
            raise DeadlineError(
                peer=f"trainer rank {late[0]}", phase="replay the step", seconds=deadline,
                progress=f"{len(ranks) - len(waiting)} of {len(ranks)} ranks are done", cure="Raise --actor-deadline.",
            )  # fmt: skip
        for one in ready:
            assert isinstance(one, connection.Connection)
            try:
                outcome = one.recv()
            except EOFError:
                ranks[one].join(END_SECONDS)
                log = (logs / f"trainer_{names[one]}.log").read_text(errors="replace")[-TAIL:]
                raise TrainerError(f"trainer rank {names[one]} ended with exit code {ranks[one].exitcode}.\n{log}") from None
            if isinstance(outcome, VimeError):
                raise outcome
            said = said or outcome
            waiting.discard(one)
    return said


def _rank(task: Task, rank: int, world: int, port: int, log: str, sender: connection.Connection) -> None:
    """One trainer process."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    try:
        sender.send(_train(task, rank, world, port))
    except VimeError as error:
        sender.send(error)


def _train(task: Task, rank: int, world: int, port: int) -> str | None:
    import torch

    from vime.backends.megatron_utils.actor import MegatronTrainer

    needed = task.state is None or task.config.lora.lora_rank is not None  # a state with adapters holds nothing else of the model
    trainer = MegatronTrainer(task.config, rank=rank, world_size=world, master_addr=LOOPBACK, master_port=port, with_weights=needed)
    try:
        if task.state is not None:
            trainer.load(task.state, resume=task.resume)
        share = trainer.data_parallel_rank
        batch, values = task.batches[share], None
        if task.values is not None:
            values = trainer.packed_values(batch, [torch.from_numpy(of_sample) for of_sample in task.values[share]])
        try:
            trainer.train(batch, values)
        except TrainerError as error:
            if not trainer.failed_step:
                raise
            return str(error)
        return None
    finally:
        trainer.shutdown()
