"""Which processes run, on what, and what is done when one fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vime.config.fields import opt

__all__ = ["ClusterConfig", "EngineConfig", "FaultToleranceConfig", "RouterConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Placement: which processes run, and on what."""

    device: str = opt("cpu", "Where trainer and engines compute.", choices=("cpu", "cuda"), choices_not_yet=("cuda",))
    actor_num_nodes: int = opt(1, "Nodes used by the trainer.", ge=1)
    actor_num_gpus_per_node: int = opt(1, "Trainer processes per node: GPUs, or processes on CPU. slime's default is 8.", ge=1)
    rollout_num_gpus: int | None = opt(None, "GPUs (on CPU: engine slots) for rollout in all; default: one engine's.", type=int, ge=0)
    rollout_num_gpus_per_engine: int = opt(
        1,
        "GPUs of one engine (its tensor-parallel size). One is right while the model fits: engines scale better than tensor parallelism.",
        ge=1,
    )
    colocate: bool = opt(
        False,
        "Trainer and engines share the same GPUs and take turns.",
    )
    offload_train: bool | None = opt(None, "Trainer frees its GPU memory during rollout; default: with --colocate.", type=bool)
    offload_rollout: bool | None = opt(None, "Engines free their GPU memory during training; default: with --colocate.", type=bool)
    train_env_vars: dict[str, Any] = opt({}, "JSON object of environment variables for the trainer processes, over what they inherit.")
    actor_deadline: float = opt(600.0, "Seconds a trainer call may take before the run ends with an error.", gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The vLLM engines; the engines' own flags are --vllm-X."""

    vllm_server_concurrency: int = opt(512, "Most requests in flight per engine.", ge=1)
    vllm_enable_deterministic_inference: bool = opt(
        False, "A seed per request and one sequence at a time on CPU: a resumed run equals an uninterrupted one bitwise."
    )
    vllm_start_deadline: float = opt(600.0, "Seconds an engine may take to become healthy.", gt=0)
    vllm_config: str | None = opt(
        None,
        "YAML file of what engines serve: models (one trained, others frozen), and of each groups of engines with flags of their own.",
        type=str,
        path="file",
    )
    prefill_num_servers: int | None = opt(
        None,
        "Engines that only prefill; the others decode.",
        type=int,
        ge=1,
        not_yet="prefill hands keys and values to decode through a KV connector, and vLLM's CPU build has none. Leave it out.",
    )
    rollout_external_engine_addrs: list[str] = opt(
        [],
        "host:port of engines on this machine that `vime engine` started; they are sent weights, and never ended.",
        many=True,
        type=str,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """A router that runs already; the flags of the router that the run starts are --router-X."""

    vllm_router_ip: str | None = opt(None, "Address of a router that runs already.", type=str)
    vllm_router_port: int | None = opt(None, "Its port.", type=int, ge=1, le=65535)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultToleranceConfig:
    """What happens when an engine fails."""

    use_fault_tolerance: bool = opt(False, "Probe the engines and replace those that fail.")
    rollout_health_check_interval: float = opt(30.0, "Seconds between two probes of an engine.", gt=0)
    rollout_health_check_timeout: float = opt(30.0, "Seconds a probe may take before its engine is replaced.", gt=0)
    rollout_health_check_first_wait: float = opt(
        300.0, "Seconds after a start or wake-up before the first probe: engines compile then. slime's default is 0.", ge=0
    )
