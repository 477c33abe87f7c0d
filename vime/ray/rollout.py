"""`RolloutManager`: the actor that turns prompts into training batches, and the driver's handle on it.

It owns the data source, the rollout function and the routers; engines are actors of their own. Groups of samples come from
the rollout function, are normalised by group id and packed, and leave as one batch per data-parallel rank in Ray's object
store.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from vime.backends.weight_transfer.control import EngineControl
from vime.config import RunConfig
from vime.config.sections import ROLLOUT_FUNCTION
from vime.config.served import ServedModel
from vime.errors import HookError, PeerError
from vime.hooks import load_hook, user_errors
from vime.packing.build import packing_metrics
from vime.ray.engine_group import EngineGroup
from vime.ray.process import WatchedActor, watched_actor
from vime.ray.routing import ROUTER_DEADLINE, Routers
from vime.ray.supervisor import Supervisor
from vime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from vime.rollout.batches import flat_samples, own_function, train_batches
from vime.rollout.engine_access import EngineAccess
from vime.rollout.producer import GroupProducer, Producer, StepProducer
from vime.rollout.recorded import record_samples, save_groups
from vime.rollout.statistics import sample_statistics
from vime.rollout.tracking import TrackedSource
from vime.utils.types import Sample

__all__ = ["Generated", "RolloutClient", "RolloutManager"]

CHILD_POLL_SECONDS = 0.25
CONTROL_SECONDS = 10.0  # of one control call to an engine
DRAIN = "finishing what is in flight before a weight sync"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """One rollout step: refs[d] is data-parallel rank d's TrainBatch in the object store."""

    refs: list[Any]
    metrics: dict[str, float]
    samples: list[dict[str, Any]]  # a few, readable


class RolloutManager(WatchedActor):
    """See the module. Methods are called one at a time."""

    def __init__(self, config: RunConfig, run_dir: str, log_dir: str) -> None:
        super().__init__(str(Path(log_dir) / "rollout_manager.log"))
        self._config, self._run_dir, self._log_dir = config, run_dir, Path(log_dir)
        self._routers = Routers(config, self._log_dir)
        self._engines = EngineAccess(self._abort_requests)
        self._controls: list[EngineControl] = []
        self._producer: Producer | None = None
        self._first_step = self._num_steps = 0
        self._last_rolled: float | None = None  # when the last rollout step was there
        self._args = self._runtime_args()
        self._source: Any = None

    def init(self, load: str | None) -> int:
        """Load hooks and data; returns the number of prompts. Runs while engines and trainers start."""
        config = self._config
        source_class = load_hook(config.data.data_source_path, "data_source_path")
        with self._source_errors(source_class):
            inner = source_class(self._args)
        folder = Path(config.checkpoint.save or self._run_dir)
        folders: dict[str, Any] = {"run_dir": folder, "log_dir": Path(self._run_dir), "load": Path(load) if load else None}
        self._source = TrackedSource(inner, config.data.data_source_path, **folders, steps_ahead=config.steps_ahead)
        with self._source_errors(source_class):
            num_prompts = len(inner)
        self._rollout = load_hook(config.rollout.rollout_function_path, "rollout_function_path")
        path = config.eval.eval_function_path
        self._eval = load_hook(path, "eval_function_path") if path else self._rollout
        return num_prompts

    def connect(self, model: ServedModel, endpoints: list[Any]) -> None:
        """Put a router in front of a model's engines; see `Routers.open`."""
        self._routers.open(model, endpoints)
        self._control(model.name, endpoints)
        self._args = self._runtime_args()

    def _runtime_args(self) -> Any:
        """What hooks see of the configuration, and of the run."""
        models, addresses = self._config.models, self._routers.addresses()
        host, port = addresses.get(models[0].name, (None, None)) if models else (None, None)
        return self._config.runtime_args(
            run_dir=self._run_dir,
            num_engines=self._config.num_engines,
            vllm_router_ip=host,
            vllm_router_port=port,
            vllm_model_routers=addresses,
            engine_access=self._engines,
        )

    def route(self, model: str, endpoints: list[Any]) -> None:
        """From now on exactly these engines are behind the model's router. May be called while another method runs."""
        self._routers.route(model, endpoints)
        self._control(model, endpoints)

    def _control(self, model: str, endpoints: list[Any]) -> None:
        if model == self._config.models[0].name:
            self._controls = [EngineControl.of(endpoint, seconds=CONTROL_SECONDS) for endpoint in endpoints]

    def _abort_requests(self) -> None:
        for control in list(self._controls):
            with contextlib.suppress(PeerError):  # an engine that is gone has nothing to return; whoever watches it says so
                control.abort()

    def begin(self, first_step: int, num_steps: int) -> None:
        """Steps first_step ... num_steps - 1 will be asked for."""
        self._first_step, self._num_steps = first_step, num_steps

    def before_sync(self) -> None:
        """The engines will get new weights. What is in flight is waited for, unless it is to go on under them."""
        if self._producer is not None and not self._config.weight_update.update_weight_in_flight:
            self._producer.drain()

    def weights_sent(self, version: int) -> None:
        """The engines hold the weights of `version` from now on."""
        self._engines.version = version
        if self._producer is not None:
            self._producer.resume(version)

    def watch(self) -> None:
        """Return when the run ends; raise when a router or what generates ahead dies."""
        while not self._stopped.wait(CHILD_POLL_SECONDS):
            self._routers.raise_dead()
            if self._producer is not None and self._producer.failure is not None and not self._stopped.is_set():
                raise self._producer.failure

    def generate(self, rollout_id: int) -> Generated:
        """One rollout step: generate, score, normalise, pack."""
        config, begun = self._config, time.monotonic()
        self._routers.check()
        self._source.begin_step(rollout_id, trained_through=rollout_id - 1)
        if config.runs_ahead:
            output = self._producing().take(rollout_id)
        else:
            output = self._roll(rollout_id)
            if self._last_rolled is not None and self._controls:
                output.metrics["perf/engine_idle_time"] = begun - self._last_rolled
        self._last_rolled = time.monotonic()
        samples = list(flat_samples(output.samples))
        self._write_down(rollout_id, output.samples)
        metrics = dict(output.metrics) | sample_statistics(self._args, samples)
        own, seconds = self._args.custom_rollout_log_function_path, time.monotonic() - begun
        if own_function(own, "custom_rollout_log_function_path", rollout_id, self._args, samples, metrics, seconds):
            metrics = {}
        batches = train_batches(config, self._args, samples, rollout_id)
        self._source.trained(samples, rollout_id)
        return Generated(
            refs=[ray.put(batch) for batch in batches],
            metrics=metrics | self._source.metrics() | packing_metrics(batches, config.packed_data),
            samples=[_readable(s) for s in samples[: self._config.logging.log_samples]],
        )

    def _roll(self, rollout_id: int) -> RolloutFnTrainOutput:
        """What the rollout function makes of one step."""
        with user_errors("--rollout-function-path", self._config.rollout.rollout_function_path, self._rollout):
            output = self._rollout(self._args, rollout_id, self._source, evaluation=False)
            if not isinstance(output, RolloutFnTrainOutput):
                output = RolloutFnTrainOutput(samples=output)
            output.samples = list(output.samples)
            list(flat_samples(output.samples))  # the user's function is to blame for what is no sample
            return output

    def _producing(self) -> Producer:
        """What generates ahead of the trainer; begun at the first step, after the first weights."""
        made: Producer | None = self._producer
        if made is None:
            config, version = self._config, self._engines.version or 0
            numbers = {"first_step": self._first_step, "num_steps": self._num_steps, "bound": config.steps_ahead, "version": version}
            if config.rollout.rollout_function_path == ROLLOUT_FUNCTION:
                made = GroupProducer(self._args, self._source, **numbers)
            else:
                deadline = config.rollout.rollout_deadline
                made = StepProducer(self._roll, deadline=deadline, **numbers)
            made.resume(version)
            self._producer = made
        return made

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Nothing is begun ahead inside."""
        if self._producer is None:
            yield
            return
        self._producer.pause()
        try:
            yield
        finally:
            self._producer.resume(self._engines.version or 0)

    def _write_down(self, rollout_id: int, groups: Sequence[Any]) -> None:
        """What --save-debug-rollout-data, --dump-details and --capsule-steps ask for."""
        if self._config.rollout_dump is not None:
            save_groups(self._config.rollout_dump, rollout_id, groups)
        if rollout_id in self._config.debug.capsule_steps:
            record_samples(self._config, rollout_id, groups)

    def evaluate(self, rollout_id: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Metrics and a few readable samples of the held-out files."""
        self._routers.check()
        own = self._config.eval.eval_function_path
        flag, path = ("--eval-function-path", own) if own else ("--rollout-function-path", self._config.rollout.rollout_function_path)
        with self._held(), user_errors(flag, path, self._eval):
            output = self._eval(self._args, rollout_id, self._source, evaluation=True)
            if not isinstance(output, RolloutFnEvalOutput):
                output = RolloutFnEvalOutput(data=output)
            if not isinstance(output.data, dict):
                raise HookError(
                    f"{flag} {path} returned a {type(output.data).__name__}; right: a RolloutFnEvalOutput, or "
                    '{name: {"rewards": [...], "truncated": [...], "samples": [...]}}.'
                )
            shown = []
            for data in output.data.values():
                shown += [_readable(sample) for sample in list(data.get("samples", []))[: self._config.logging.log_samples]]
            metrics = dict(output.metrics)
        own = self._args.custom_eval_rollout_log_function_path
        if own_function(own, "custom_eval_rollout_log_function_path", rollout_id, self._args, output.data, metrics):
            metrics = {}
        return metrics, shown

    def save(self, path: str, step: int) -> None:
        """Write the data's part of the commit of `step`: the data source's state, and the place in the ledger.

        What is generated ahead goes on: the source is locked for the moment, and holds a copy of what is out.
        """
        self._source.save(path, step)

    def _source_errors(self, source_class: type) -> contextlib.AbstractContextManager[None]:
        return user_errors("--data-source-path", self._config.data.data_source_path, source_class)

    def stop(self) -> None:
        """End the routers."""
        self._stopped.set()
        if self._producer is not None:
            self._producer.close()
        if self._source is not None:
            self._source.close()
        self._routers.stop()


def _readable(sample: Sample) -> dict[str, Any]:
    return {
        "index": sample.index,
        "group": sample.group_index,
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "reward": sample.reward,
        "status": sample.status.value,
        "weight_version": sample.weight_versions[-1] if sample.weight_versions else None,
    }


class RolloutClient:
    """The driver's handle on the manager and the engines; every wait goes through the supervisor."""

    NAME = "rollout manager"

    def __init__(self, config: RunConfig, supervisor: Supervisor, manager: Any, groups: list[EngineGroup]) -> None:
        self._config, self._supervisor, self._manager = config, supervisor, manager
        self.groups = groups  # one a model, the trained one's first; none with --debug-train-only
        self._init_ref: Any = None
        self._draining: Any = None  # the manager's answer to `before_sync`, while it is awaited
        self.num_prompts = 0

    @classmethod
    def launch(cls, config: RunConfig, supervisor: Supervisor, placement: Any, run_dir: Path, log_dir: Path, run_id: str) -> RolloutClient:
        """Create the manager and the engines; their servers begin to start at once."""
        manager = watched_actor(RolloutManager).options(num_cpus=0).remote(config, str(run_dir), str(log_dir))
        supervisor.watch(cls.NAME, manager.watch.options(concurrency_group="watch").remote(), log_dir / "rollout_manager.log")
        groups: list[EngineGroup] = []
        for model in config.models:
            before = sum(len(group) for group in groups)
            groups.append(EngineGroup(config, model, supervisor, placement, log_dir, run_id, first_bundle=before))
        return cls(config, supervisor, manager, groups)

    def _begun(self, load: Path | None) -> Any:
        if self._init_ref is None:
            self._init_ref = self._manager.init.remote(str(load) if load else None)
        return self._init_ref

    def prompts(self, load: Path | None) -> int:
        """Wait for the data alone; returns the number of prompts."""
        deadline = self._config.engine.vllm_start_deadline
        return self._supervisor.get([self._begun(load)], names=[self.NAME], phase="reading the prompts", deadline=deadline)[0]

    def ready(self, load: Path | None) -> None:
        """Wait until data and engines are ready, then put the router in front of the engines."""
        starts = [ref for group in self.groups for ref in group.starts()]
        names = [name for group in self.groups for name in group.names]
        deadline = self._config.engine.vllm_start_deadline + 30.0
        self.num_prompts, *endpoints = self._supervisor.get(
            [self._begun(load), *starts], names=[self.NAME, *names], phase="start", deadline=deadline
        )
        up = iter(endpoints)
        for group in self.groups:
            mine = list(itertools.islice(up, len(group)))
            self._call(self._manager.connect, group.model, mine, phase="router start and handshake", deadline=deadline)
            group.serve(mine, self._route)

    def _route(self, model: str, endpoints: list[Any]) -> None:
        method = self._manager.route.options(concurrency_group="control")
        deadline = ROUTER_DEADLINE * (1 + sum(len(group) for group in self.groups))
        self._call(method, model, endpoints, phase="engines behind the router", deadline=deadline)

    @property
    def has_engines(self) -> bool:
        """Whether there is anything to send weights to."""
        return bool(self.groups)

    def endpoints(self) -> list[Any]:
        """Where the control ports of the engines are that a weight sync is to reach."""
        return self.groups[0].receivers() if self.groups else []

    def generate(self, rollout_id: int) -> Generated:
        """One rollout step."""
        return self._call(self._manager.generate, rollout_id, phase=f"rollout {rollout_id}", deadline=self._deadline)

    def begin(self, first_step: int, num_steps: int) -> None:
        """Say which steps will be asked for."""
        self._call(self._manager.begin, first_step, num_steps, phase="begin", deadline=60.0)

    def before_sync(self) -> None:
        """Say that the engines will get new weights; returns when they may.

        When no engine serves (any more), they may at once: what is in flight waits for one, which serves only after the sync, and is
        finished under the new weights.
        """
        if not self.groups[0].serves:
            return
        self._draining = self._manager.before_sync.remote()
        self._supervisor.wait_for(
            lambda: not self.groups[0].serves or bool(ray.wait([self._draining], timeout=0)[0]),
            peer=self.NAME,
            phase=DRAIN,
            deadline=self._deadline,
            progress=lambda: "engines serve, and it has not answered",
            refs=[self._draining],
        )
        if self.groups[0].serves:
            self._drained()

    def _drained(self) -> None:
        """Wait for the manager to have finished what was in flight, where it was told to."""
        if self._draining is not None:
            ref, self._draining = self._draining, None
            self._supervisor.get([ref], names=[self.NAME], phase=DRAIN, deadline=self._deadline)

    def weights_sent(self, version: int) -> None:
        """Say that the engines hold the weights of `version`."""
        self._drained()
        self._call(self._manager.weights_sent, version, phase=f"weights of version {version}", deadline=60.0)

    def evaluate(self, rollout_id: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """The held-out files with the current weights."""
        waits = 2 if self._config.runs_ahead else 1  # for a call of the user's rollout function that runs, then for its own
        return self._call(self._manager.evaluate, rollout_id, phase="evaluation", deadline=waits * self._deadline)

    def save(self, path: str, step: int) -> None:
        """Write the data's part of the commit of `step`."""
        self._call(self._manager.save, path, step, phase="save", deadline=300.0)

    def shutdown(self) -> None:
        """End router and engines; never raises."""
        refs = [self._manager.stop.remote(), *(ref for group in self.groups for ref in group.shutdown_refs())]
        ray.wait(refs, num_returns=len(refs), timeout=60.0)
        for group in self.groups:
            group.kill()
        with contextlib.suppress(Exception):
            ray.kill(self._manager)

    @property
    def _deadline(self) -> float:
        return self._config.rollout.rollout_deadline + 60.0  # the rollout's own deadline speaks first, and knows more

    def _call(self, method: Any, *args: Any, phase: str, deadline: float) -> Any:
        return self._supervisor.get([method.remote(*args)], names=[self.NAME], phase=phase, deadline=deadline)[0]
