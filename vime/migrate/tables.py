"""What `vime migrate` knows beyond `vime.config.renamed`: reasons, values with other names, what needs a person."""

from __future__ import annotations

__all__ = ["BY_HAND", "DEFAULTS", "DIFFERS", "DROPPED_VARIABLES", "EXPANDED", "FUNCTIONS", "RENAMED_WHY", "SAY", "SGLANG_DROPPED", "VALUES"]

_SCHEDULER = "it tunes SGLang's scheduler; vLLM's has no such knob."
SGLANG_DROPPED: dict[str, str] = {
    "--sglang-schedule-policy": _SCHEDULER,
    "--sglang-schedule-conservativeness": _SCHEDULER,
    "--sglang-num-continuous-decode-steps": _SCHEDULER,
    "--sglang-max-prefill-tokens": _SCHEDULER,
    "--sglang-enable-mixed-chunk": _SCHEDULER,
    "--sglang-decode-log-interval": "engines log what they log; metrics are in metrics.jsonl.",
    "--sglang-log-requests": "engines log what they log; samples are in samples.jsonl.",
    "--sglang-enable-metrics": "engines always serve /metrics.",
    "--sglang-watchdog-timeout": "every wait has a deadline: --rollout-request-timeout, --rollout-deadline.",
    "--sglang-dist-timeout": "every wait has a deadline: --vllm-start-deadline, --update-weight-deadline.",
    "--sglang-trust-remote-code": "a model folder's code is not run.",
    "--sglang-skip-server-warmup": "an engine counts as started once it has answered a request.",
    "--sglang-enable-memory-saver": "--offload-rollout decides whether engines free their memory.",
    "--sglang-enable-dp-lm-head": "it goes with SGLang's attention in data parallel.",
    "--sglang-moe-dense-tp-size": "it goes with SGLang's attention in data parallel.",
    "--sglang-disable-overlap-schedule": _SCHEDULER,
    "--sglang-enable-dp-attention": "an engine is one tensor-parallel group: more engines (--rollout-num-gpus) do the same.",
}

RENAMED_WHY: dict[str, str] = {  # what to know of a flag whose new name does not mean quite the same
    "--sglang-mem-fraction-static": "SGLang counts weights and KV cache, vLLM everything it uses: the share may be a little higher.",
    "--sglang-chunked-prefill-size": "vLLM's budget is for a whole step, decoding included.",
    "--sglang-page-size": "vLLM's block size; leave it out unless you need it.",
    "--sglang-context-length": "it bounds a prompt with its response, and is the engine's max_model_len.",
    "--vllm-max-model-len": "it bounds a prompt with its response, and is the engine's max_model_len.",
}

VALUES: dict[str, dict[str, str]] = {  # flag of theirs -> value -> value here
    "--sglang-attention-backend": {
        "fa3": "FLASH_ATTN",
        "fa4": "FLASH_ATTN",
        "flashinfer": "FLASHINFER",
        "triton": "TRITON_ATTN",
        "flashmla": "FLASHMLA",
        "cutlass_mla": "CUTLASS_MLA",
    },
    "--sglang-kv-cache-dtype": {"fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "auto": "auto"},
    "--sglang-router-policy": {"consistent_hashing": "consistent_hash"},
    "--router-policy": {"consistent_hashing": "consistent_hash"},
    "--opd-type": {"sglang": "vllm"},
}

_EXPERTS = (("--vllm-enable-expert-parallel",), "experts are spread over all of an engine's GPUs.")
EXPANDED: dict[str, tuple[tuple[str, ...], str]] = {  # one flag of theirs -> ours, which take no value, and why
    "--offload": (("--offload-train", "--offload-rollout"), "two flags here."),
    "--sglang-ep-size": _EXPERTS,
    "--sglang-expert-parallel-size": _EXPERTS,
}

_ALL2ALL = "say --vllm-all2all-backend deepep_high_throughput or deepep_low_latency."
_DISAGGREGATION = "every engine prefills and decodes here."
SAY: dict[str, str] = {  # what a person has to say instead
    "--sglang-moe-a2a-backend": _ALL2ALL,
    "--sglang-enable-deepep-moe": _ALL2ALL,
    "--sglang-deepep-mode": _ALL2ALL,
    "--sglang-disaggregation-mode": _DISAGGREGATION,
    "--sglang-disaggregation-transfer-backend": _DISAGGREGATION,
    "--sglang-disaggregation-ib-device": _DISAGGREGATION,
}

BY_HAND: frozenset[str] = frozenset(  # of those that are gone: what they did must be said in another way, by a person
    "--megatron-config-path --custom-config-path --disable-rollout-global-dataset --freeze-indexer --buffer-sort-by-staleness "
    "--flush-cache-interval --pg-loss-type --use-score-centering --megatron-deepgemm-forward-layers --megatron-deepgemm-moe-forward-layers "
    "--rollout-buffer-url --sglang-tp-size --sglang-moe-dp-size "
    "--sglang-custom-pull-weights-pre-read-hook --vllm-custom-pull-weights-pre-read-hook --load-forge-rollout-data".split()
)

DEFAULTS: dict[str, str] = {  # flag -> slime's and Vime's default, where ours is another one and it matters
    "--actor-num-gpus-per-node": "8",
}

DIFFERS: tuple[str, ...] = (  # of vime.config.renamed.CHANGED: those that mean something else where they are given
    "--eval-interval",
    "--eval-max-context-len",
    "--hf-checkpoint",
    "--recompute-loss-function",
    "--ref-load",
    "--rollout-max-context-len",
    "--save-interval",
)

FUNCTIONS: dict[str, str] = {  # their functions whose counterpart has another name
    "slime.rollout.sglang_rollout.generate_rollout": "vime.rollout.vllm_rollout.generate_rollout",
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async": "vime.rollout.vllm_rollout.generate_rollout",  # with a bound
    "vime.rollout.fully_async_rollout.generate_rollout_fully_async": "vime.rollout.vllm_rollout.generate_rollout",
    "slime.rollout.sglang_rollout.generate": "vime.rollout.vllm_rollout.generate",
    "slime.rollout.sglang_rollout.GenerateState": "vime.rollout.vllm_rollout.GenerateState",
}

_OWN = "vime sets it itself."
_RAY = "the run starts a Ray of its own."
_ENGINE = "it is SGLang's; engines are vLLM's."
DROPPED_VARIABLES: dict[str, str] = {  # environment variable, or a prefix ending in *
    "MASTER_ADDR": _OWN,
    "MASTER_PORT": _OWN,
    "CUDA_DEVICE_MAX_CONNECTIONS": _OWN,
    "PYTHONUNBUFFERED": "each process writes its log at once.",
    "PYTHONBUFFERED": "no program reads it.",
    "NCCL_CUMEM_ENABLE": _OWN,
    "RAY_*": _RAY,
    "SGLANG_*": _ENGINE,
    "SGL_*": _ENGINE,
    "SLIME_*": "it is slime's own.",
}
