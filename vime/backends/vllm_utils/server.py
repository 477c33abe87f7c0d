"""`EngineServer`: one vLLM API server as our child process, from its command line to its certain end."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from vime.backends.vllm_utils.control_guard import ADAPTER_ENV, SECRET_ENV
from vime.backends.vllm_utils.handshake import SERVED_NAME, greet_engine
from vime.backends.vllm_utils.plugin import BACKENDS
from vime.backends.vllm_utils.process import LOOPBACK, PortClaim, ServerProcess, new_secret
from vime.backends.vllm_utils.translation import has_scale_out_flag, needs_translation
from vime.backends.weight_transfer.control import EngineControl, EngineEndpoint
from vime.backends.weight_transfer.segment import remove_stale_segments
from vime.config import RunConfig
from vime.config.sections import ENGINE_LORA_RANKS, POLICY_ADAPTER
from vime.errors import ConfigError, EngineError

__all__ = ["EngineServer", "engine_command", "engine_environment"]

_MODULE = "vllm.entrypoints.openai.api_server"
_PLUGIN = "vime_weight_transfer"  # our entry point's name in the group vllm.general_plugins
_COMPILE_FLAGS = ("--no-enforce-eager", "--compilation-config", "--optimization-level")
_CPU_KV_CACHE_BYTES = 2**30  # --vllm-kv-cache-memory-bytes overrides it
_SHARED_GPU = 0.4  # of a GPU's memory, for an engine that shares it with a trainer; --vllm-gpu-memory-utilization overrides it
_WARM_UP = [1, 2, 3]  # token ids of the request that every engine answers before it is called healthy


def runs_on_cpu(config: RunConfig) -> bool:
    """Whether the engines compute on the CPU."""
    return config.cluster.device == "cpu"


def engine_command(config: RunConfig, *, port: int) -> list[str]:
    """The command line of an engine: what the framework decides, then the user's --vllm- tokens (the last one wins)."""
    if config.model.hf_checkpoint is None:
        raise ConfigError("An engine needs a model: give --hf-checkpoint FOLDER.")
    cpu = runs_on_cpu(config)
    flags = {
        "--model": config.model.hf_checkpoint,
        "--host": LOOPBACK,
        "--port": str(port),
        "--served-model-name": SERVED_NAME,
        "--tensor-parallel-size": str(config.cluster.rollout_num_gpus_per_engine),
        "--seed": str(config.data.rollout_seed),
        "--weight-transfer-config": json.dumps({"backend": BACKENDS[config.weight_transport]}),
        "--worker-extension-cls": "vime.backends.vllm_utils.worker_extension.WorkerExtension",
        "--middleware": "vime.backends.vllm_utils.control_guard.ControlGuard",
        "--logprobs-mode": "processed_logprobs",  # of the distribution that is sampled from, temperature included
        "--generation-config": "vllm",  # the model folder's sampling defaults would change what is sampled
        "--uvicorn-log-level": "warning",
    }
    if config.rollout.rollout_max_context_len is not None:
        flags["--max-model-len"] = str(config.rollout.rollout_max_context_len)
    if config.rollout.rollout_top_k > 0:
        flags["--max-logprobs"] = str(max(config.rollout.rollout_top_k, 20))  # of a token: what it was chosen from
    switches = ["--enable-scale-out"] if has_scale_out_flag() else []
    if config.algorithm.use_rollout_routing_replay:
        switches.append("--enable-return-routed-experts")
    if config.lora.adapters_are_synced:
        assert config.lora.lora_rank is not None
        flags |= {"--max-lora-rank": str(next(r for r in ENGINE_LORA_RANKS if r >= config.lora.lora_rank))}
        flags |= {"--max-loras": "1", "--max-cpu-loras": "1"}
        switches.append("--enable-lora")
    if not cpu:
        flags["--dtype"] = "bfloat16"
        if config.cluster.colocate:
            flags["--gpu-memory-utilization"] = str(_SHARED_GPU)
        if config.offloads_rollout:
            switches.append("--enable-sleep-mode")
    if cpu:
        flags["--dtype"] = "float32"
        if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):  # vLLM lets this variable override the flag
            flags["--kv-cache-memory-bytes"] = str(_CPU_KV_CACHE_BYTES)
        switches.append("--enforce-eager")  # compiling costs more start-up time than a CPU run wins back
    if config.engine.vllm_enable_deterministic_inference:
        switches.append("--no-enable-prefix-caching")  # what is cached differs between a resumed and an uninterrupted run
        if cpu:
            flags["--max-num-seqs"] = "1"
    words = [word for pair in flags.items() for word in pair]
    if needs_translation():  # before the guard, which then stands around it: the last one is the outermost
        words = ["--middleware", "vime.backends.vllm_utils.translation.Translation", *words]
    return [sys.executable, "-m", _MODULE, *words, *switches, *config.vllm_tokens]


def engine_environment(config: RunConfig, *, secret: str) -> dict[str, str]:
    """The engine's environment: ours, with what the device needs. Values that the user has set for CPU engines stay."""
    env = dict(os.environ)
    plugins = env.get("VLLM_PLUGINS")
    if plugins is not None and _PLUGIN not in plugins.split(","):
        env["VLLM_PLUGINS"] = f"{plugins},{_PLUGIN}"
    env |= {
        SECRET_ENV: secret,
        "VLLM_SERVER_DEV_MODE": "1",  # serves the control endpoints; the guard keeps them ours
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if config.lora.adapters_are_synced:
        env |= {ADAPTER_ENV: POLICY_ADAPTER, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    env.setdefault("HF_HUB_OFFLINE", "1")  # a model is a folder here; a name that is none must not start a download
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"))
    if runs_on_cpu(config):
        env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # more threads only spin against EngineCore and the trainer
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if not any(token.startswith(_COMPILE_FLAGS) for token in config.vllm_tokens):
            env["TORCH_COMPILE_DISABLE"] = "1"  # one sampling helper would be compiled at the first request: 15 s
    else:
        env.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it gives no log-probs of what top-k and top-p leave
    if config.algorithm.use_rollout_routing_replay:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the one that returns routing
    if not runs_on_cpu(config) and config.engine.vllm_enable_deterministic_inference:
        env["VLLM_BATCH_INVARIANT"] = "1"
    return env


class EngineServer:
    """Engine `index` of a run. It begins to start when constructed; `wait_healthy` returns once it has answered a request."""

    def __init__(
        self,
        config: RunConfig,
        *,
        index: int,
        log_path: Path,
        run_id: str,
        name: str | None = None,
        port: int | None = None,
        secret: str | None = None,
        extra_env: Mapping[str, str] | None = None,
    ) -> None:
        """`name`: default "engine <index>". `port`: a fixed loopback port (default: any free one). `secret`: of its control paths
        (default: a new one). `extra_env` goes on top of the engine's environment."""
        self._config = config
        name = name or f"engine {index}"
        self.name = f"{name} of run {run_id}"
        remove_stale_segments()
        self._claim = PortClaim(port, what=self.name)
        secret = secret or new_secret()
        self.endpoint = EngineEndpoint(name=name, url=f"http://{LOOPBACK}:{self._claim.port}", secret=secret)
        env = engine_environment(config, secret=secret) | dict(extra_env or {})
        command = engine_command(config, port=self._claim.port)
        self._process = ServerProcess(self.name, command, env=env, log_path=Path(log_path))

    @property
    def pid(self) -> int:
        """Root of the engine's process tree."""
        return self._process.pid

    @property
    def control(self) -> EngineControl:
        """A client of the engine's control endpoints."""
        return EngineControl.of(self.endpoint)

    def wait_healthy(self, seconds: float) -> EngineEndpoint:
        """Wait until the engine serves, check what it can do, and let it answer one request (which compiles and allocates).

        EngineError with the log's last lines as soon as the engine dies; DeadlineError after `seconds`.
        """
        cure = "Check the model folder, the --vllm- flags and the free memory."
        control = self.control
        self._process.wait_ready(control.healthy, seconds, cure=cure)
        self._claim.close()
        try:
            greet_engine(self._config, control)
            control.init_weight_update({})
            control.prompt_log_probs(_WARM_UP, seconds=max(seconds, 60.0))
        except EngineError as error:
            raise EngineError(f"{error}\nLast lines of its log:\n{self.log_tail()}") from error
        return self.endpoint

    def poll(self) -> int | None:
        """None while the engine runs, else its exit status."""
        return self._process.poll()

    def log_tail(self, lines: int = 12) -> str:
        """The last lines of the engine's log."""
        return self._process.log_tail(lines)

    def stop(self) -> None:
        """End the engine and all its processes; returns when they are gone. A second call does nothing."""
        self._claim.close()
        self._process.stop()
