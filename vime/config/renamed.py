"""slime's and Vime's flags that are spelled otherwise here, or have no meaning here. Data, for error texts and `vime migrate`.

Every flag of theirs (tests/rules/slime_flags.txt) is one of: declared in a section under its own name, Megatron's own, of the
router's (--router-X) or the engine's (--vllm-X) own family, or a row below.
"""

from __future__ import annotations

__all__ = ["CHANGED", "GONE", "GONE_PREFIXES", "MEGATRON", "RENAMED", "explained"]

MEGATRON: frozenset[str] = frozenset(  # slime declares these anew; here they are Megatron's own, checked by Megatron's parser
    "--distributed-backend --distributed-timeout-minutes --no-save-optim --optimizer --padded-vocab-size --record-memory-history".split()
)

RENAMED: dict[str, str] = {  # same value, other name
    "--opd-teacher-model": "--opd-teacher-load",
    "--vllm-router-policy": "--router-policy",
    "--vllm-weight-transfer-timeout-sec": "--update-weight-deadline",
    "--sglang-router-ip": "--vllm-router-ip",
    "--sglang-router-port": "--vllm-router-port",
    "--sglang-router-policy": "--router-policy",
    "--sglang-router-request-timeout-secs": "--router-request-timeout-secs",
    "--sglang-server-concurrency": "--vllm-server-concurrency",
    "--sglang-config": "--vllm-config",
    "--sglang-enable-deterministic-inference": "--vllm-enable-deterministic-inference",
    "--sglang-context-length": "--rollout-max-context-len",
    "--sglang-mem-fraction-static": "--vllm-gpu-memory-utilization",
    "--sglang-max-running-requests": "--vllm-max-num-seqs",
    "--sglang-chunked-prefill-size": "--vllm-max-num-batched-tokens",
    "--sglang-cuda-graph-bs": "--vllm-cudagraph-capture-sizes",
    "--sglang-cuda-graph-max-bs": "--vllm-max-cudagraph-capture-size",
    "--sglang-disable-cuda-graph": "--vllm-enforce-eager",
    "--sglang-disable-radix-cache": "--no-vllm-enable-prefix-caching",
    "--sglang-disable-custom-all-reduce": "--vllm-disable-custom-all-reduce",
    "--sglang-attention-backend": "--vllm-attention-backend",
    "--sglang-moe-runner-backend": "--vllm-moe-backend",
    "--sglang-kv-cache-dtype": "--vllm-kv-cache-dtype",
    "--sglang-quantization": "--vllm-quantization",
    "--sglang-page-size": "--vllm-block-size",
    "--sglang-tool-call-parser": "--vllm-tool-call-parser",
    "--sglang-reasoning-parser": "--vllm-reasoning-parser",
    "--sglang-log-level": "--vllm-uvicorn-log-level",
    "--sglang-enable-eplb": "--vllm-enable-eplb",
}

CHANGED: dict[str, str] = {  # same name, other default or meaning, and why
    "--actor-num-gpus-per-node": "1 instead of 8: a run takes what it is told to take, and one process is where one begins.",
    "--rollout-num-gpus": "One engine's by default; slime needs it given unless trainer and engines share GPUs.",
    "--rollout-max-context-len": "Bounds generation, too, and the engine's sequences; slime derives the longest prompt from it only.",
    "--rollout-max-response-len": "1024 instead of none: an unbounded response never ends.",
    "--rollout-sample-hook-path": "Several functions follow one flag, instead of one flag each.",
    "--over-sampling-batch-size": "By default as many prompts as are missing, instead of a whole batch each time: less is thrown away.",
    "--hf-checkpoint": "The trainer starts from it, too: nothing is converted beforehand.",
    "--ref-load": "A Hugging Face folder, and only the reference: it does not silently become the start weights.",
    "--load": "The folder of a run. Weights, optimizer, step and data go on together; slime begins at step 0 when it finds no checkpoint.",
    "--save-interval": "The last step is always saved.",
    "--num-epoch": "Refused beside --num-rollout, where slime ignores it.",
    "--global-batch-size": "By default a whole rollout step; a remainder is spread over the steps, where slime drops it.",
    "--n-samples-per-prompt": "1 is refused where rewards are compared in groups: every advantage would be 0.",
    "--kl-coef": "Refused where the estimator has no token rewards; slime computes the reference's log-probs and ignores them.",
    "--kl-loss-coef": "0 is refused beside --use-kl-loss: the reference would be computed for a term that changes nothing.",
    "--eval-interval": "Evaluation is also done before the first step and after the last, and not at the end of epochs.",
    "--eval-max-context-len": "Bounds generation in evaluation; in slime an example reads it.",
    "--rm-url": "Refused without --rm-type remote_rm.",
    "--opd-type": "vllm instead of sglang.",
    "--update-weight-transport": "Chosen by where trainer and engines run, instead of nccl; shared memory and CUDA IPC have names.",
    "--update-weight-delta-encoding": "overwrite instead of xor: a change that is applied twice must not corrupt the weights.",
    "--rollout-health-check-first-wait": "300 s instead of 0: an engine that still compiles is not dead.",
    "--loss-mask-type": "distill_qwen trains every answer of a conversation, to its end token; slime the last alone, without it.",
    "--recompute-loss-function": "For a loss of one's own; ours keep nothing that large. slime's help says the opposite of what it does.",
    "--log-probs-chunk-size": "-1 is a size that suits the device, instead of all rows at a time.",
    "--use-stateless-adam": "Does not need --no-save-optim: what is saved has moments of 0.",
    "--memory-snapshot-dir": "The run's log folder instead of the current one.",
}

_ONE_GROUP = "An engine is one tensor-parallel group: start more engines with --rollout-num-gpus."
_ENGINE_PATCH = "It needs patches of the engine's source; engines run unpatched here."
_QUEUE = "Rollout data travels through Ray's object store; the data source's state is part of the commit."
_SHAPE = "The model's shape comes from its config.json."
_PLUGIN = "It is read by one example only."
_TESTS = "Assertions are in the tests; a run always logs the difference between trainer and engine."
_OWN_STATE = "A resumed run reads it from its commit."

GONE: dict[str, str] = {  # why, and what to say instead
    "--offload": "Say --offload-train and --offload-rollout.",
    "--sglang-enable-lora": "Engines take adapters with --lora-rank and --lora-sync adapter.",
    "--num-gpus-per-node": "Ray says what each node has; --actor-num-gpus-per-node and --rollout-num-gpus say what to take.",
    "--qwen-gdn-backend": "The kernel is chosen by what is installed.",
    "--release-train": "Trainer processes live as long as the run; --offload-train frees their GPU memory.",
    "--update-weight-delta-checksum": "Each version is always verified.",
    "--freeze-indexer": "Say --freeze-params-name-list with a regular expression.",
    "--allgather-cp": "Context parallelism splits sequences in zigzag; nothing is to be chosen.",
    "--model-name": "The family is the model_type of config.json.",
    "--rollout-data-transport": _QUEUE,
    "--rollout-data-dir": _QUEUE,
    "--rollout-storage-profile": _QUEUE,
    "--rollout-storage-declaration": _QUEUE,
    "--rollout-queue-run-id": _QUEUE,
    "--rollout-queue-online-gc": _QUEUE,
    "--rollout-queue-lease-seconds": _QUEUE,
    "--rollout-queue-segment-mib": _QUEUE,
    "--rollout-io-concurrency": _QUEUE,
    "--rollout-session-id": "Engines end with the run that started them.",
    "--rollout-cleanup-timeout": "A run always cleans up behind itself, with deadlines of its own.",
    "--disable-rollout-global-dataset": "Give a data source of your own as --data-source-path; --prompt-data then may be left out.",
    "--start-rollout-id": _OWN_STATE,
    "--ref-ckpt-step": "--ref-load is a Hugging Face folder: one set of weights.",
    "--opd-teacher-ckpt-step": "--opd-teacher-load is a Hugging Face folder: one set of weights.",
    "--balance-data": "Batches are always balanced over data-parallel ranks by estimated cost. Leave it out.",
    "--balance-by-flops": "Micro-batches are always balanced by estimated cost, within --max-tokens-per-gpu. Leave it out.",
    "--log-probs-max-tokens-per-gpu": "slime never reads it; --max-tokens-per-gpu bounds log-prob passes, too.",
    "--data-pad-size-multiplier": "Packs are padded to what the layout needs and no further.",
    "--megatron-config-path": "The critic's own values are flags: --critic-lr, --critic-lr-warmup-iters, --critic-load.",
    "--critic-num-nodes": "The critic runs on the trainer's layout.",
    "--critic-num-gpus-per-node": "The critic runs on the trainer's layout.",
    "--critic-save": "The critic is part of the commit in --save.",
    "--wandb-key": "A key on the command line is seen by everybody on the machine: put it into WANDB_API_KEY.",
    "--wandb-always-use-train-step": "Metrics of a step carry that step's number.",
    "--load-forge-rollout-data": "Say --load-debug-rollout-data.",
    "--memory-recorder": "Torch's own recorder is used.",
    "--check-weight-update-equal": "Each sync is proven: --weight-proof-tolerance bounds the difference.",
    "--train-backend": "Megatron trains; nothing is to be chosen.",
    "--http-proxy": "slime never reads it; set the environment's http_proxy for your own hooks.",
    "--use-distributed-post": "Requests leave from the rollout manager; one process keeps thousands in flight.",
    "--rollout-buffer-url": _PLUGIN,
    "--fetch-trajectory-retry-times": _PLUGIN,
    "--rollout-task-type": _PLUGIN,
    "--min-batch-collection-ratio": "slime never reads it.",
    "--megatron-deepgemm-forward-layers": _ENGINE_PATCH,
    "--megatron-deepgemm-forward-modules": _ENGINE_PATCH,
    "--megatron-deepgemm-moe-forward-layers": _ENGINE_PATCH,
    "--megatron-deepgemm-moe-forward-modules": _ENGINE_PATCH,
    "--ci-test": _TESTS,
    "--ci-disable-kl-checker": _TESTS,
    "--ci-train-rollout-logprob-abs-diff-threshold": _TESTS,
    "--ci-save-grad-norm": _TESTS,
    "--ci-load-grad-norm": _TESTS,
    "--custom-config-path": "Files of flags are given as --config FILE; values for your own hooks belong in a file of theirs.",
    "--vllm-weight-sync-packed": "Weights always travel in flat buckets; --update-weight-buffer-size is their size.",
    "--sglang-dp-size": _ONE_GROUP,
    "--sglang-pp-size": _ONE_GROUP,
    "--sglang-enable-dp-attention": _ONE_GROUP,
    "--sglang-tp-size": "Say --rollout-num-gpus-per-engine.",
    "--sglang-ep-size": "Say --vllm-enable-expert-parallel: experts are spread over the engine's GPUs.",
    "--sglang-moe-dp-size": _ONE_GROUP,
    "--sglang-speculative-algorithm": 'Say --vllm-speculative-config \'{"method": "mtp", "num_speculative_tokens": 3}\'.',
    "--sglang-custom-pull-weights-pre-read-hook": _ENGINE_PATCH,
    "--vllm-custom-pull-weights-pre-read-hook": _ENGINE_PATCH,
    "--flush-cache-interval": "Keys and values are computed anew at each sync, also with --update-weight-in-flight.",
    "--buffer-sort-by-staleness": "The buffer serves the oldest weights first by itself; --buffer-filter-path chooses otherwise.",
    "--pg-loss-type": "The loss follows from --advantage-estimator and --loss-type.",
    "--use-score-centering": _ENGINE_PATCH,
    "--score-centering-top-k": _ENGINE_PATCH,
    "--routing-replay-prefetch-microbatches": "Routing stays in memory.",
    "--force-fp8-ue8m0-scale": "Weights travel in the precision in which they are trained.",
    "--use-gated-attention": _SHAPE,
    "--post-self-attn-layernorm": _SHAPE,
    "--post-mlp-layernorm": _SHAPE,
    "--qkv-format": "Sequences are always packed (thd).",
    "--train-memory-margin-bytes": "`vime plan` says what fits.",
    "--megatron-to-hf-mode": "Weights are always converted by the family's list of operations.",
    "--transfer-backend": _QUEUE,
    "--mooncake-store-init-kwargs": _QUEUE,
}

GONE_PREFIXES: dict[str, str] = {  # whole families, after the rows above
    "--sglang-speculative-": "Say --vllm-speculative-config with a JSON object.",
    "--sglang-": "Engines are vLLM's: give vLLM's option of that meaning as --vllm-X (`vime train --help=vllm` lists them).",
    "--dspark-": "Draft models are not trained here.",
    "--teacher-": "There is no server for a teacher in the trainer; on-policy distillation has --opd-type.",
    "--megatron-server-": "There is no server for the trainer's log-probs; on-policy distillation has --opd-type.",
}


def explained(flag: str) -> str | None:
    """What a flag of slime's or Vime's is here, in a sentence or two; None for a name that no table knows."""
    positive = "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else flag
    for name in (flag, positive):
        if name in RENAMED:
            return f"{name} is spelled {RENAMED[name]} here."
        if name in GONE:
            return f"{name} does not exist here. {GONE[name]}"
    for prefix, why in GONE_PREFIXES.items():
        if positive.startswith(prefix):
            return f"{flag} does not exist here. {why}"
    return None
