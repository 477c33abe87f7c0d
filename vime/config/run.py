"""`RunConfig`: the tree of sections, and the tokens of the other owners. `ArgsView`: the flat view that hooks get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vime.config import sections as s
from vime.config.served import ACTOR, ServedModel, ServerGroup

__all__ = ["SECTIONS", "ArgsView", "RunConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run. Sections are typed; the tokens of Megatron, vLLM and vllm-router stay raw and are theirs to validate."""

    cluster: s.ClusterConfig = field(default_factory=s.ClusterConfig)
    model: s.ModelConfig = field(default_factory=s.ModelConfig)
    lora: s.LoraConfig = field(default_factory=s.LoraConfig)
    data: s.DataConfig = field(default_factory=s.DataConfig)
    rollout: s.RolloutConfig = field(default_factory=s.RolloutConfig)
    reward: s.RewardConfig = field(default_factory=s.RewardConfig)
    eval: s.EvalConfig = field(default_factory=s.EvalConfig)
    algorithm: s.AlgorithmConfig = field(default_factory=s.AlgorithmConfig)
    critic: s.CriticConfig = field(default_factory=s.CriticConfig)
    training: s.TrainingConfig = field(default_factory=s.TrainingConfig)
    weight_update: s.WeightUpdateConfig = field(default_factory=s.WeightUpdateConfig)
    engine: s.EngineConfig = field(default_factory=s.EngineConfig)
    router: s.RouterConfig = field(default_factory=s.RouterConfig)
    fault_tolerance: s.FaultToleranceConfig = field(default_factory=s.FaultToleranceConfig)
    checkpoint: s.CheckpointConfig = field(default_factory=s.CheckpointConfig)
    logging: s.LoggingConfig = field(default_factory=s.LoggingConfig)
    debug: s.DebugConfig = field(default_factory=s.DebugConfig)
    megatron_tokens: tuple[str, ...] = ()  # e.g. ("--tensor-model-parallel-size", "2")
    vllm_tokens: tuple[str, ...] = ()  # prefix stripped, e.g. ("--max-num-seqs", "64")
    router_tokens: tuple[str, ...] = ()  # prefix stripped, e.g. ("--policy", "round_robin")
    served: tuple[ServedModel, ...] = ()  # what --vllm-config says, the trained model first
    given: frozenset[str] = frozenset()  # names of the fields that the command line set, be it to their default
    megatron: dict[str, Any] = field(default_factory=dict)  # what Megatron's parser made of its tokens (plain values)
    sources: dict[str, str] = field(default_factory=dict, compare=False)  # field, owner's flag, "megatron.x" -> who set it

    @property
    def args(self) -> ArgsView:
        """The flat read-only view for hooks."""
        return ArgsView(self)

    def runtime_args(self, **runtime: Any) -> ArgsView:
        """The same with values that are known only once the run is up (router address, ...)."""
        return ArgsView(self, runtime)

    def megatron_size(self, name: str) -> int:
        """A parallel size that Megatron's parser resolved, e.g. "tensor_model_parallel_size"; 1 when not given."""
        return int(self.megatron.get(name) or 1)

    @property
    def weight_transport(self) -> str:
        """What --update-weight-transport says; else by where trainer and engines run."""
        return self.weight_update.update_weight_transport or ("ipc" if self.cluster.colocate else "shm")

    @property
    def offloads_train(self) -> bool:
        """The trainer gives its GPU memory back while the engines work."""
        return self.cluster.colocate if self.cluster.offload_train is None else self.cluster.offload_train

    @property
    def offloads_rollout(self) -> bool:
        """The engines give their GPU memory back while the trainer works."""
        return self.cluster.colocate if self.cluster.offload_rollout is None else self.cluster.offload_rollout

    @property
    def actor_world_size(self) -> int:
        """Trainer processes."""
        return self.cluster.actor_num_nodes * self.cluster.actor_num_gpus_per_node

    @property
    def data_parallel_size(self) -> int:
        """Trainer processes that see different samples."""
        model = 1
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            model *= self.megatron_size(name)
        return self.actor_world_size // model

    @property
    def runs_ahead(self) -> bool:
        """Whether groups are generated while the trainer works."""
        return self.rollout.max_weight_staleness > 0

    @property
    def steps_ahead(self) -> int:
        """Steps that a sample may be trained after the weights that its oldest token was sampled under."""
        return (self.rollout.max_weight_staleness + 1) * self.weight_update.update_weights_interval - 1

    @property
    def packed_data(self) -> s.DataConfig:
        """`data` with the token budget of one micro-batch, which the context-parallel ranks share."""
        budget, ranks = self.data.max_tokens_per_gpu, self.megatron_size("context_parallel_size")
        return self.data if budget is None else replace(self.data, max_tokens_per_gpu=budget * ranks)

    @property
    def rollout_dump(self) -> str | None:
        """File of each step's samples, with {rollout_id}; None when none is asked for."""
        return _inside(self.debug.dump_details, "rollout_data/{rollout_id}.jsonl") or self.debug.save_debug_rollout_data

    @property
    def train_dump(self) -> str | None:
        """File of each step's training data and results, with {rollout_id}; None when none is asked for."""
        return _inside(self.debug.dump_details, "train_data/{rollout_id}.pt") or self.debug.save_debug_train_data

    @property
    def capsule_folder(self) -> str | None:
        """Where step capsules go; None when there is no place for them."""
        return self.debug.capsule_dir or (None if self.checkpoint.save is None else f"{self.checkpoint.save}/capsules")

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """What engines serve, the trained model first; nothing with --debug-train-only."""
        if self.debug.debug_train_only:
            return ()
        if self.served:
            return self.served
        total = self.cluster.rollout_num_gpus
        count = len(self.engine.rollout_external_engine_addrs)
        if not count:
            count = 1 if total is None else total // self.cluster.rollout_num_gpus_per_engine
        return (ServedModel(name=ACTOR, model_path=None, groups=(ServerGroup(num_engines=count),)),)

    @property
    def num_engines(self) -> int:
        """Engines of the model that is trained."""
        return self.models[0].num_engines if self.models else 0

    @property
    def num_own_engines(self) -> int:
        """Engines that the run starts itself, of all models."""
        return 0 if self.engine.rollout_external_engine_addrs else sum(model.num_engines for model in self.models)

    def for_engine(self, model: ServedModel, vllm_tokens: tuple[str, ...] = ()) -> RunConfig:
        """The configuration as an engine of `model` with these options of its own sees it."""
        changed: dict[str, Any] = {"vllm_tokens": self.vllm_tokens + vllm_tokens}
        if model.model_path is not None:  # the lengths of the rollout are not its own
            changed["model"] = replace(self.model, hf_checkpoint=model.model_path)
            changed["rollout"] = replace(
                self.rollout, rollout_max_context_len=None, rollout_max_prompt_len=None, rollout_max_response_len=1, rollout_top_k=-1
            )
        return replace(self, **changed)


def _inside(folder: str | None, template: str) -> str | None:
    """A file's template in a folder whose name is taken as it is."""
    return None if folder is None else folder.replace("{", "{{").replace("}", "}}") + "/" + template


SECTIONS: dict[str, type] = {
    f.name: f.default_factory  # type: ignore[misc]
    for f in fields(RunConfig)
    if isinstance(f.default_factory, type) and f.default_factory is not dict
}


class ArgsView:
    """All sections' fields by their flat names (slime's `args`), read-only. Megatron's values answer after ours.

    Runtime values answer first: vllm_router_ip, vllm_router_port, vllm_model_routers, num_engines, run_dir.
    """

    __slots__ = ("_config", "_index", "_runtime")

    def __init__(self, config: RunConfig, runtime: dict[str, Any] | None = None) -> None:
        index = {f.name: section for section, cls in SECTIONS.items() for f in fields(cls)}
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_runtime", dict(runtime or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._runtime:
            return self._runtime[name]
        if name in self._index:
            return getattr(getattr(self._config, self._index[name]), name)
        if name in self._config.megatron:
            return self._config.megatron[name]
        raise AttributeError(f"args has no '{name}'. Flags of this run are listed by `vime train --print-config`.")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"args is read-only ('{name}' was assigned). Keep your own state in your own object or in Sample.metadata.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __reduce__(self) -> tuple[Any, ...]:
        return (ArgsView, (self._config, self._runtime))
