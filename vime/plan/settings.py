"""`Settings`: everything that the arithmetic looks at, taken from a run's configuration. Other settings are tried by replacing fields."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.config import RunConfig
from vime.config.estimators import ESTIMATORS
from vime.config.sections import LoraConfig
from vime.errors import ConfigError
from vime.plan.devices import GIB, GPUS, Machine
from vime.plan.shape import ModelSize, read_model

__all__ = ["PlanOptions", "Settings", "settings_of"]

CPU_KV_BYTES = GIB  # what a CPU engine is given where --vllm-kv-cache-memory-bytes does not say (backends/vllm_utils/server.py)
UTILIZATION = 0.92  # vLLM 0.32's default of --gpu-memory-utilization
KV_BLOCK = 16  # tokens of one block of the KV cache; 128 on a CPU
KV_BLOCK_CPU = 128
RECOMPUTED_DEFAULT = ("core_attn",)  # Megatron's default of --recompute-modules


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The plan's own flags: what the machines are like, and how long samples will be."""

    gpu: str = "H200"
    device_memory: float | None = None  # GiB of one GPU
    host_memory: float | None = None  # GiB of one node
    gpus_per_node: int = 8
    sync_bandwidth: float | None = None  # 1e9 bytes a second
    mean_prompt_len: int | None = None
    mean_response_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run in numbers. Sizes in bytes, lengths in tokens."""

    model: ModelSize
    machine: Machine
    trains: bool
    generates: bool
    # placement
    nodes: int
    trainers_per_node: int
    num_engines: int
    engine_gpus: int
    colocate: bool
    offload_train: bool
    offload_rollout: bool
    # the trainer's layout
    tensor: int
    sequence: bool
    pipeline: int
    virtual: int  # model chunks a pipeline rank holds
    first_layers: int | None  # layers of the first and of the last stage, where they differ from the others'
    last_layers: int | None
    context: int
    expert: int
    expert_tensor: int
    # the trainer's memory
    param_bytes: int  # of one weight: 2 (bfloat16) or 4
    grad_bytes: int
    distributed_optimizer: bool
    recompute: str  # "none", "selective" or "full"
    recompute_method: str  # with full: "uniform" or "block"
    recompute_layers: int  # with full: layers of one recomputed unit, or layers that are recomputed
    recompute_modules: tuple[str, ...]  # with selective
    vocab_multiple: int
    critic: bool  # a second trainer of the same layout, with one output a token
    lora_rank: int  # of adapters, which alone are trained; 0 = all weights are
    lora_targets: tuple[str, ...]  # names of the layers with adapters; () = all
    lora_dropout: bool
    roles: int  # further sets of weights (reference, teacher, old policies) that wait in host memory
    whole_logits: bool  # of all positions, not only of the trained ones
    saves_behind: bool  # a copy of the trainer's state is in host memory while the run goes on
    # batches
    prompts: int
    samples: int  # of one prompt
    steps: int  # optimizer steps of a rollout step
    num_rollout: int | None
    max_tokens: int | None  # budget of a micro-batch, over its context-parallel ranks together; None = micro_batch samples
    micro_batch: int
    log_probs_chunk: int  # rows; -1 = by size
    stateless_adam: bool  # moments are there while the trainer works alone
    # lengths
    longest: int  # prompt and response together
    longest_response: int
    mean_prompt: int
    mean_response: int
    # engines
    engine_param_bytes: int
    cache_bytes: int  # of one number in the KV cache
    kv_bytes: int | None  # of the KV cache of one GPU, where it is given; else what `utilization` leaves
    utilization: float
    max_seqs: int
    batched_tokens: int
    graphs: bool
    concurrency: int
    bucket_bytes: int

    @property
    def cpu(self) -> bool:
        """Whether everything computes on the CPU."""
        return self.machine.device == "cpu"

    @property
    def world(self) -> int:
        """Trainer ranks."""
        return self.nodes * self.trainers_per_node

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.world // (self.pipeline * self.expert * self.expert_tensor)

    @property
    def stage_counts(self) -> list[int]:
        """Layers of each pipeline stage; they add up to the model's when the layout is possible."""
        own = [count for count in (self.first_layers, self.last_layers) if count is not None]
        others = self.pipeline - len(own)
        counts = [(self.model.layers - sum(own)) // others] * others if others > 0 else []
        first = [] if self.first_layers is None else [self.first_layers]
        return first + counts + ([] if self.last_layers is None else [self.last_layers])

    @property
    def padded_vocab(self) -> int:
        """Vocabulary of the trainer's embedding: a multiple of what --make-vocab-size-divisible-by and tensor parallelism ask."""
        multiple = self.vocab_multiple
        while multiple % self.tensor:
            multiple += self.vocab_multiple
        return -(-self.model.vocab // multiple) * multiple

    @property
    def rollout_gpus(self) -> int:
        """GPUs of all engines."""
        return self.num_engines * self.engine_gpus

    @property
    def cache_bytes_per_token(self) -> float:
        """Of the KV cache, on each GPU of an engine; groups are split over the GPUs as far as they go, a compressed vector is not."""
        shared = 1 if self.model.latent is not None else min(self.engine_gpus, self.model.groups)
        return self.model.cached_layers * self.model.cache_width * self.cache_bytes / shared

    @property
    def state_bytes_per_sequence(self) -> float:
        """Of the layers that keep a float32 state instead of keys and values, on each GPU of an engine."""
        delta = self.model.delta
        return 0.0 if delta is None else len(delta.layers) * delta.state * 4 / self.engine_gpus


def settings_of(config: RunConfig, options: PlanOptions) -> Settings:
    """The numbers of a run. Raises ConfigError or CheckpointError for what cannot be planned."""
    assert config.model.hf_checkpoint is not None  # a rule has seen to it
    model = read_model(config.model.hf_checkpoint)
    cpu = config.cluster.device == "cpu"
    if not cpu and config.cluster.actor_num_gpus_per_node > options.gpus_per_node:
        asked = config.cluster.actor_num_gpus_per_node
        raise ConfigError(f"--actor-num-gpus-per-node {asked}: a node has {options.gpus_per_node} GPUs. Say how many with --gpus-per-node.")
    machine = _machine(cpu, options)
    alg, cluster, data, engine = config.algorithm, config.cluster, config.data, _Tokens(config.vllm_tokens)
    train, generate = not config.debug.debug_rollout_only, not config.debug.debug_train_only
    engines = config.num_engines
    if cluster.colocate and cluster.rollout_num_gpus is None:
        engines = max(1, config.actor_world_size // cluster.rollout_num_gpus_per_engine)
    longest, longest_response = _longest(config, model)
    prompt, response = _means(config, options, longest, longest_response)
    rollouts = (data.rollout_batch_size or 1) * data.n_samples_per_prompt
    steps = data.num_steps_per_rollout or (max(1, round(rollouts / data.global_batch_size)) if data.global_batch_size else 1)
    roomy = machine.device_bytes >= 70 * GIB and "A100" not in machine.device
    param_bytes = 4 if cpu else 2
    settings = Settings(
        model=model,
        machine=machine,
        trains=train,
        generates=generate and engines > 0,
        nodes=cluster.actor_num_nodes,
        trainers_per_node=cluster.actor_num_gpus_per_node,
        num_engines=engines,
        engine_gpus=cluster.rollout_num_gpus_per_engine,
        colocate=cluster.colocate and train and generate,
        offload_train=cluster.colocate if cluster.offload_train is None else cluster.offload_train,
        offload_rollout=cluster.colocate if cluster.offload_rollout is None else cluster.offload_rollout,
        **_layout(config.megatron, model.layers),
        param_bytes=param_bytes,
        grad_bytes=4 if cpu or not config.megatron.get("grad_reduce_in_bf16") else 2,
        distributed_optimizer=True,  # the trainer always uses it
        **_recompute(config.megatron),
        vocab_multiple=int(config.megatron.get("make_vocab_size_divisible_by") or 128),
        critic=train and ESTIMATORS[alg.advantage_estimator].critic,
        lora_rank=config.lora.lora_rank or 0,
        lora_targets=_lora_targets(config.lora),
        lora_dropout=config.lora.lora_dropout > 0,
        roles=_roles(config),
        whole_logits=alg.loss_type == "custom_loss",
        saves_behind=train and config.checkpoint.async_save,
        prompts=data.rollout_batch_size or 1,
        samples=data.n_samples_per_prompt,
        steps=max(1, min(steps, rollouts)),
        num_rollout=data.num_rollout,
        max_tokens=data.max_tokens_per_gpu if data.use_dynamic_batch_size else None,
        micro_batch=data.micro_batch_size,
        log_probs_chunk=config.training.log_probs_chunk_size,
        stateless_adam=config.training.use_stateless_adam,
        longest=longest,
        longest_response=longest_response,
        mean_prompt=prompt,
        mean_response=response,
        engine_param_bytes=_dtype_bytes(engine.text("dtype"), 4 if cpu else 2, "--vllm-dtype"),
        cache_bytes=_dtype_bytes(engine.text("kv-cache-dtype"), 4 if cpu else 2, "--vllm-kv-cache-dtype"),
        kv_bytes=_kv_bytes(engine, cpu),
        utilization=engine.number("gpu-memory-utilization", UTILIZATION),
        max_seqs=int(engine.number("max-num-seqs", 128 if cpu else 1024 if roomy else 256)),
        batched_tokens=int(engine.number("max-num-batched-tokens", 8192 if roomy else 2048)),
        graphs=not cpu and not engine.has("enforce-eager"),
        concurrency=config.engine.vllm_server_concurrency,
        bucket_bytes=config.weight_update.update_weight_buffer_size,
    )
    check_layout(settings)
    return settings


def _roles(config: RunConfig) -> int:
    """Sets of weights beside the policy's. With adapters the reference is the model without them, unless it is another one."""
    model, alg = config.model, config.algorithm
    reference = alg.use_kl_loss or alg.kl_coef != 0
    if config.lora.lora_rank is not None and model.ref_load in (None, model.hf_checkpoint):
        reference = False
    held = max(2, config.rollout.max_weight_staleness + 1)  # versions, as MegatronTrainer holds them; of adapters they are small
    old = held if model.keep_old_actor and config.lora.lora_rank is None else 0
    return int(reference) + int(model.opd_teacher_load is not None) + old


def _lora_targets(lora: LoraConfig) -> tuple[str, ...]:
    """The names of the layers with adapters; () = all. What cannot be read of --lora-load is told when the run is checked."""
    if lora.lora_load is None or lora.lora_target_modules:
        return tuple(lora.lora_target_modules)
    try:
        found = json.loads((Path(lora.lora_load) / "adapter_config.json").read_text(encoding="utf-8"))["target_modules"]
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return tuple(found) if isinstance(found, list) else ()


def check_layout(settings: Settings) -> None:
    """Raise ConfigError for sizes that do not divide one another."""
    if problems := layout_problems(settings):
        raise ConfigError(*problems)


def layout_problems(s: Settings) -> list[str]:
    """What does not divide what. Megatron's rules for the trainer, vLLM's for the engines."""
    model, out = s.model, []

    def divides(part: int, whole: int, flag: str, what: str) -> None:
        if whole % part:
            out.append(f"{flag} {part} does not divide {what} ({whole}).")

    if s.trains:
        divides(s.tensor * s.pipeline * s.context, s.world, "tensor x pipeline x context parallelism of", "the trainer's processes")
        divides(s.tensor, model.heads, "--tensor-model-parallel-size", "num_attention_heads")
        if model.latent is None:
            divides(s.tensor, model.groups, "--tensor-model-parallel-size", "num_key_value_heads")
        if model.ffn:
            divides(s.tensor, model.ffn, "--tensor-model-parallel-size", "intermediate_size")
        out += _stage_problems(s)
        if model.moe is None and s.expert > 1:
            out.append(f"--expert-model-parallel-size {s.expert}: {model.architecture} has no experts.")
        if model.moe is not None:
            divides(s.expert, model.moe.experts, "--expert-model-parallel-size", "the experts of a layer")
            divides(s.expert_tensor, model.moe.ffn, "--expert-tensor-parallel-size", "an expert's intermediate size")
            divides(s.expert * s.expert_tensor * s.pipeline, s.world, "expert x expert-tensor x pipeline parallelism of", "the processes")
    if s.generates:
        divides(s.engine_gpus, model.heads, "--rollout-num-gpus-per-engine", "num_attention_heads")
    return out


def _stage_problems(s: Settings) -> list[str]:
    """Layers must go evenly into the stages, but for a first or last one that is given its own, and a stage's into its chunks."""
    counts = s.stage_counts
    if sum(counts) != s.model.layers or min(counts) < 1:
        return [f"--pipeline-model-parallel-size {s.pipeline} does not divide num_hidden_layers ({s.model.layers}) into stages {counts}."]
    return [f"{s.virtual} chunks a rank do not divide a stage of {n} layers." for n in sorted(set(counts)) if n % s.virtual]


def _machine(cpu: bool, options: PlanOptions) -> Machine:
    if cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        host = int((options.device_memory or options.host_memory or memory / GIB) * GIB)
        shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
        return Machine(
            device="cpu",
            device_bytes=host,
            host_bytes=host,
            shm_bytes=shm.f_blocks * shm.f_frsize if shm else None,
            gpus_per_node=len(os.sched_getaffinity(0)),
            sync_bytes_per_s=(options.sync_bandwidth or 0.25) * 1e9,
            sync_overhead_s=0.15,
        )
    memory_gib = options.device_memory or GPUS[options.gpu]
    return Machine(
        device=options.gpu,
        device_bytes=int(memory_gib * GIB),
        host_bytes=int(options.host_memory * GIB) if options.host_memory else None,
        gpus_per_node=options.gpus_per_node,
        sync_bytes_per_s=(options.sync_bandwidth or 20.0) * 1e9,
        sync_overhead_s=0.1,
    )


def _layout(megatron: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Megatron's parallel sizes."""

    def size(name: str, default: int = 1) -> int:
        return int(megatron.get(name) or default)

    tensor, pipeline = size("tensor_model_parallel_size"), size("pipeline_model_parallel_size")
    virtual = size("num_virtual_stages_per_pipeline_rank")
    if chunk := size("num_layers_per_virtual_pipeline_stage", 0):
        virtual = max(1, layers // pipeline // chunk)
    return {
        "first_layers": megatron.get("decoder_first_pipeline_num_layers"),
        "last_layers": megatron.get("decoder_last_pipeline_num_layers"),
        "tensor": tensor,
        "sequence": bool(megatron.get("sequence_parallel")) and tensor > 1,
        "pipeline": pipeline,
        "virtual": virtual,
        "context": size("context_parallel_size"),
        "expert": size("expert_model_parallel_size"),
        "expert_tensor": size("expert_tensor_parallel_size", tensor),
    }


def _recompute(megatron: Mapping[str, Any]) -> dict[str, Any]:
    how = megatron.get("recompute_granularity") or ("selective" if megatron.get("recompute_activations") else "none")
    return {
        "recompute": how,
        "recompute_method": megatron.get("recompute_method") or "uniform",
        "recompute_layers": int(megatron.get("recompute_num_layers") or 1),
        "recompute_modules": tuple(megatron.get("recompute_modules") or RECOMPUTED_DEFAULT),
    }


def _longest(config: RunConfig, model: ModelSize) -> tuple[int, int]:
    """(longest prompt and response, longest response)."""
    rollout = config.rollout
    context = rollout.rollout_max_context_len or model.max_positions
    if config.debug.debug_train_only:
        return context, context - 1
    response = min(rollout.rollout_max_response_len, context - 1)
    prompt = rollout.rollout_max_prompt_len
    return (context if prompt is None else min(context, prompt + response)), response


def _means(config: RunConfig, options: PlanOptions, longest: int, longest_response: int) -> tuple[int, int]:
    """Mean lengths of prompt and response: given, or assumed to be half of the longest."""
    room = config.rollout.rollout_max_prompt_len or max(1, longest - longest_response)
    prompt = options.mean_prompt_len or max(1, min(room, longest - 1) // 2)
    response = options.mean_response_len or max(1, longest_response // 2)
    if prompt + response > longest:
        raise ConfigError(
            f"--mean-prompt-len {prompt} and --mean-response-len {response} are more than the longest sample has ({longest} tokens)."
        )
    return prompt, response


def _kv_bytes(engine: _Tokens, cpu: bool) -> int | None:
    given = engine.text("kv-cache-memory-bytes")
    if given is not None:
        return _size(given, "--vllm-kv-cache-memory-bytes")
    if not cpu:
        return None
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    return int(float(space) * GIB) if space else CPU_KV_BYTES


def _size(text: str, flag: str) -> int:
    """vLLM's sizes: "1073741824", "1GiB", "25.5g"; k, m, g, t count in thousands, K, M, G, T and KiB ... in 1024s."""
    number = text.rstrip("bBiI")
    suffix = number[-1:] if number[-1:].isalpha() else ""
    power = " kmgt".find(suffix.lower()) if suffix else 0
    try:
        return int(float(number.removesuffix(suffix)) * (1000 if suffix.islower() else 1024) ** power)
    except ValueError:
        raise ConfigError(f"{flag} '{text}' is not a number of bytes that the plan understands.") from None


def _dtype_bytes(name: str | None, default: int, flag: str) -> int:
    if name is None or name == "auto":
        return default
    for start, size in (("float32", 4), ("bfloat16", 2), ("float16", 2), ("half", 2), ("float", 4), ("fp8", 1), ("int8", 1)):
        if name.startswith(start):
            return size
    raise ConfigError(f"{flag} {name}: the plan does not know its size. Known are float32, bfloat16, float16, fp8, int8.")


class _Tokens:
    """vLLM's tokens, as far as the plan reads them; they are valid: vLLM's own parser has seen them."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._values: dict[str, str] = {}
        name = None
        for token in tokens:
            if token.startswith("--"):
                name, _, value = token[2:].replace("_", "-").partition("=")
                self._values[name] = value
            elif name is not None and not self._values[name]:
                self._values[name] = token

    def has(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def number(self, name: str, default: float) -> float:
        return float(self._values.get(name) or default)
