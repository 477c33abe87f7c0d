"""The engines' and the router's command lines and environment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vime.backends.vllm_utils import arguments
from vime.backends.vllm_utils.router import router_command
from vime.backends.vllm_utils.server import engine_command, engine_environment
from vime.config import RunConfig
from vime.config import sections as s
from vime.errors import ConfigError

CPU = s.ClusterConfig(device="cpu")
MODEL = s.ModelConfig(hf_checkpoint="some/model")


def value(command: list[str], flag: str) -> str:
    return command[len(command) - command[::-1].index(flag)]


def test_the_framework_decides_address_model_and_seed() -> None:
    config = RunConfig(
        cluster=CPU,
        model=MODEL,
        data=s.DataConfig(rollout_batch_size=1, rollout_seed=5),
        rollout=s.RolloutConfig(rollout_max_context_len=99),
    )
    command = engine_command(config, port=1234)
    found = {flag: value(command, flag) for flag in ("--model", "--host", "--port", "--seed", "--max-model-len", "--dtype")}
    assert found == {
        "--model": "some/model",
        "--host": "127.0.0.1",
        "--port": "1234",
        "--seed": "5",
        "--max-model-len": "99",
        "--dtype": "float32",
    }


def flags_of(command: list[str]) -> set[str]:
    """The command's flags, switched off or on."""
    return {"--" + word.removeprefix("--").removeprefix("no-") for word in command if word.startswith("--")}


def test_each_flag_that_we_pass_is_refused_from_the_user_or_said_to_be_a_default_of_ours() -> None:
    everything = RunConfig(
        cluster=CPU,
        model=MODEL,
        rollout=s.RolloutConfig(rollout_max_context_len=99),
        engine=s.EngineConfig(vllm_enable_deterministic_inference=True),
        lora=s.LoraConfig(lora_rank=4, lora_sync="adapter"),
    )
    shared = replace(everything, cluster=s.ClusterConfig(device="cuda", colocate=True))
    engine = flags_of(engine_command(everything, port=1)) | flags_of(engine_command(shared, port=1))
    assert engine - set(arguments.OWNED_VLLM) == arguments.OVERRIDABLE_VLLM
    router = flags_of(router_command(["http://127.0.0.1:1"], port=1, metrics_port=2, router_tokens=()))
    assert router - set(arguments.OWNED_ROUTER) == arguments.OVERRIDABLE_ROUTER


def test_an_engine_takes_adapters_where_they_are_synced_alone() -> None:
    merged, alone = (RunConfig(cluster=CPU, model=MODEL, lora=s.LoraConfig(lora_rank=20, lora_sync=how)) for how in ("merged", "adapter"))
    assert value(engine_command(alone, port=1), "--max-lora-rank") == "32", "the next rank that vLLM has"
    assert "--enable-lora" not in engine_command(merged, port=1)
    assert engine_environment(alone, secret="x" * 32)["VIME_POLICY_ADAPTER"] == "policy"
    assert "VIME_POLICY_ADAPTER" not in engine_environment(merged, secret="x" * 32)


def test_the_users_tokens_come_last_and_win() -> None:
    config = RunConfig(cluster=CPU, model=MODEL, vllm_tokens=("--uvicorn-log-level", "info"))
    command = engine_command(config, port=1)
    assert value(command, "--uvicorn-log-level") == "info"
    assert command.index("--uvicorn-log-level") < len(command) - 2
    assert router_command([], port=1, metrics_port=2, router_tokens=("--policy", "random")).count("--policy") == 2


def test_deterministic_inference_on_cpu_runs_one_sequence_at_a_time_without_a_prefix_cache() -> None:
    config = RunConfig(cluster=CPU, model=MODEL, engine=s.EngineConfig(vllm_enable_deterministic_inference=True))
    command = engine_command(config, port=1)
    assert value(command, "--max-num-seqs") == "1"
    assert "--no-enable-prefix-caching" in command


def test_an_engine_needs_a_model() -> None:
    with pytest.raises(ConfigError, match="--hf-checkpoint"):
        engine_command(RunConfig(cluster=CPU), port=1)


def test_cpu_engines_run_one_thread_and_compile_only_when_asked_to() -> None:
    env = engine_environment(RunConfig(cluster=CPU, model=MODEL), secret="x" * 32)
    assert (env["OMP_NUM_THREADS"], env["VLLM_CPU_OMP_THREADS_BIND"], env["TORCH_COMPILE_DISABLE"]) == ("1", "nobind", "1")
    asked = RunConfig(cluster=CPU, model=MODEL, vllm_tokens=("--no-enforce-eager",))
    assert "TORCH_COMPILE_DISABLE" not in engine_environment(asked, secret="x" * 32)


def test_the_variable_that_overrides_vllms_cache_flag_is_the_users_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(cluster=CPU, model=MODEL)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert value(engine_command(config, port=1), "--kv-cache-memory-bytes") == str(2**30)
    assert "VLLM_CPU_KVCACHE_SPACE" not in engine_environment(config, secret="x" * 32)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    assert "--kv-cache-memory-bytes" not in engine_command(config, port=1)


def test_a_list_of_allowed_plugins_is_given_ours_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    assert engine_environment(RunConfig(cluster=CPU, model=MODEL), secret="x" * 32)["VLLM_PLUGINS"] == "lora,vime_weight_transfer"


def test_an_engine_on_a_gpu_computes_as_the_trainer_does_and_shares_when_colocated() -> None:
    alone = engine_command(RunConfig(cluster=s.ClusterConfig(device="cuda"), model=MODEL), port=1)
    assert value(alone, "--dtype") == "bfloat16"
    assert value(alone, "--weight-transfer-config") == '{"backend": "shm"}'
    assert not {"--enforce-eager", "--enable-sleep-mode", "--gpu-memory-utilization"} & set(alone)
    cluster = s.ClusterConfig(device="cuda", colocate=True)
    shared = engine_command(RunConfig(cluster=cluster, model=MODEL), port=1)
    assert value(shared, "--weight-transfer-config") == '{"backend": "vime_ipc"}'
    assert {"--enable-sleep-mode", "--gpu-memory-utilization"} <= set(shared)
    awake = engine_command(RunConfig(cluster=replace(cluster, offload_rollout=False), model=MODEL), port=1)
    assert "--enable-sleep-mode" not in awake
