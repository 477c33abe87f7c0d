"""One trainer process: the Ray side of `MegatronTrainer`, which itself knows nothing of Ray."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from vime.config import RunConfig
from vime.ray.process import WatchedActor
from vime.types import TrainBatch, WeightSyncReport

if TYPE_CHECKING:  # the driver imports this module to create the actors; torch and Megatron load in the actors alone
    from torch.distributed import TCPStore

    from vime.backends.megatron_utils.actor import MegatronTrainer
    from vime.backends.megatron_utils.update_weight.sync import WeightUpdater

__all__ = ["MegatronTrainRayActor"]

LOOPBACK = "127.0.0.1"  # all trainers are on one node


class MegatronTrainRayActor(WatchedActor):
    """Rank `rank` of the trainer. All methods but the first two are collective: every rank must be called."""

    def __init__(self, config: RunConfig, rank: int, world_size: int, log: str) -> None:
        super().__init__(log)
        if config.cluster.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is loaded: a GPU of this machine is not used
        self._config, self._rank, self._world_size = config, rank, world_size
        self._trainer: MegatronTrainer | None = None
        self._store: TCPStore | None = None
        self._updater: WeightUpdater | None = None
        self._sent_version: int | None = None  # the version that the weights of now were sent as; None once trained on

    def rendezvous(self) -> tuple[str, int]:
        """(address, port) where the ranks meet; asked of rank 0, which serves there from now on, so that nobody can take the port."""
        from torch.distributed import TCPStore

        listener = socket.socket()
        listener.bind((LOOPBACK, 0))  # left to itself the store listens on every interface
        listener.listen(128)
        port = listener.getsockname()[1]
        self._store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # rank 0 joins as a client, too
        return LOOPBACK, port

    def init(self, master_addr: str, master_port: int, load: str | None, resume: bool = True) -> dict[str, Any]:
        """Build the model and optimizer; load `load` (a commit's trainer folder) when given.

        With `resume` False the commit is another run's: only its weights and optimizer moments are taken.
        """
        os.environ.update(RANK=str(self._rank), WORLD_SIZE=str(self._world_size), LOCAL_RANK=str(self._rank))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._trainer = self._build(rank=self._rank, world_size=self._world_size, master_addr=master_addr, master_port=master_port)
        if load is not None:
            self._trainer.load(load, resume=resume)
        return {"data_parallel_rank": self._trainer.data_parallel_rank, "num_parameters": self._trainer.num_parameters}

    def _build(self, **where: Any) -> MegatronTrainer:
        from vime.backends.megatron_utils.actor import MegatronTrainer

        return MegatronTrainer(self._config, **where)

    def train(self, batch: TrainBatch, values: Any = None) -> dict[str, float]:
        """One rollout step of training on this rank's share, with the critic's values. The metrics are the same on all ranks."""
        self._sent_version = None
        return self.trainer.train(batch, values)

    def returns(self) -> Any:
        """What a critic is to predict in the step that was trained on last."""
        return self.trainer.returns

    def save(self, path: str) -> None:
        """Write the trainer's part of a commit."""
        self.trainer.save(path)

    def start_save(self, path: str) -> None:
        """Take the state that is to be the trainer's part of a commit, and begin to write it in the background."""
        self.trainer.start_save(path)

    def wait_saved(self) -> None:
        """Until this rank's part is written, or could not be; to be called in the group "save", beside the other methods."""
        self.trainer.wait_saved()

    def finish_save(self) -> None:
        """Make the part complete that `start_save` began."""
        self.trainer.finish_save()

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face folder."""
        self.trainer.save_hf(path)

    def update_weights(self, version: int | None, engines: list[Any], probe: list[int], run_id: str) -> WeightSyncReport | None:
        """Send this trainer's weights to the engines as `version`, with proof. Rank 0 returns the report.

        `version` None: send once more what was sent last; nothing is sent, and None returned, when it was trained on meanwhile.
        """
        from vime.backends.megatron_utils.update_weight.adapters import AdapterUpdater
        from vime.backends.megatron_utils.update_weight.sync import WeightUpdater

        version = self._sent_version if version is None else version
        if version is None:
            return None
        trainer, faults = self.trainer, self._config.fault_tolerance
        expected = trainer.log_probs(probe)
        if version != self._sent_version:
            trainer.sent_as(version)
            self._sent_version = version
        adapters, size = trainer.adapters, self._config.weight_update.update_weight_buffer_size
        alone = adapters if self._config.lora.adapters_are_synced else None  # else they are merged into the weights
        buckets = trainer.hf_weights(size) if alone is None else alone.buckets(size)
        if self._rank != 0:
            for _ in buckets:
                pass
            return None
        if self._updater is None:  # kept: it remembers the sync before, which its proof compares with
            step = faults.rollout_health_check_timeout if faults.use_fault_tolerance else None
            update, transport = self._config.weight_update, self._config.weight_transport
            if alone is None:
                self._updater = WeightUpdater(update, run_id=run_id, step_seconds=step, transport=transport)
            else:
                self._updater = AdapterUpdater(update, run_id=run_id, step_seconds=step, write=alone.write)
        return self._updater.update(engines, version, buckets, probe, lambda _tokens: expected)

    def give_back(self, weights: bool) -> None:
        """Give GPU memory back until the next step or save; the weights too where `weights`."""
        self.trainer.give_back(weights=weights)

    def shutdown(self) -> None:
        """Leave the process group; the actor can be ended after this."""
        self._stopped.set()
        if self._trainer is not None:
            self._trainer.shutdown()
            self._trainer = None

    @property
    def trainer(self) -> MegatronTrainer:
        """The trainer, once `init` was called."""
        assert self._trainer is not None, "init() comes first"
        return self._trainer
