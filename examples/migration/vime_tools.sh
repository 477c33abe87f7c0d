#!/usr/bin/env bash
# A launch script of Vime's kind: GRPO with a tool, trainer and vLLM engines on GPUs of their own, more than one machine.
set -euo pipefail

: "${DATA:?set DATA to the folder with models and prompts}"
NUM_GPUS=${NUM_GPUS:-4}
RUN_DIR="${DATA}/runs/tools"

cd "$(dirname "$0")/../.."
source examples/migration/models/qwen3_4b.sh

CKPT_ARGS=(
    --hf-checkpoint "${DATA}/Qwen3-4B"
    --ref-load "${DATA}/Qwen3-4B"
    --save "${RUN_DIR}"
    --save-interval 50
)

ROLLOUT_ARGS=(
    --prompt-data "${DATA}/problems.parquet"
    --input-key prompt --label-key label
    --apply-chat-template
    --apply-chat-template-kwargs '{"enable_thinking": false}'
    --custom-generate-function-path tool_use.rollout.generate
    --custom-rm-path tool_use.rollout.reward
    --num-rollout "${STEPS:-500}"
    --rollout-batch-size 64
    --n-samples-per-prompt 8
    --rollout-max-context-len 16384
    --rollout-max-response-len 4096
    --rollout-stop-token-ids 151643 151645
    --num-steps-per-rollout 2
)

ALGORITHM_ARGS=(
    --advantage-estimator grpo
    --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type k3
    --kl-coef 0.0
    --use-tis
    --entropy-coef 0.0
)

if [[ "${LONG:-0}" == 1 ]]; then
    ALGORITHM_ARGS+=(--eps-clip-high 0.28)
fi

TRAIN_ARGS=(
    --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.01
    --tensor-model-parallel-size 2 --sequence-parallel
    --context-parallel-size 2
    --use-dynamic-batch-size --max-tokens-per-gpu 8192
    --micro-batch-size 1
)

WANDB_ARGS=(
    --use-wandb
    --wandb-project tools
    --wandb-group qwen3-4b
    --wandb-key "${WANDB_KEY}"
)

VLLM_ARGS=(
    --rollout-num-gpus 4
    --rollout-num-gpus-per-engine 1
    --vllm-gpu-memory-utilization 0.85
    --vllm-max-num-seqs 256
    --vllm-router-policy consistent_hash
    --vllm-max-model-len 16384
    --vllm-enable-prefix-caching
)

ray start --head --num-gpus 8
for worker in $(cat hosts.txt); do
    ssh "$worker" "ray start --address=${MASTER_ADDR}:6379 --num-gpus 8" &
done
wait

ray job submit --address="http://127.0.0.1:8265" \
    --runtime-env-json='{"env_vars": {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_TIMEOUT": "22", "MASTER_ADDR": "${MASTER_ADDR}"}}' \
    -- python3 train.py \
    --actor-num-nodes 2 --actor-num-gpus-per-node ${NUM_GPUS} \
    "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${ALGORITHM_ARGS[@]}" \
    "${TRAIN_ARGS[@]}" "${WANDB_ARGS[@]}" "${VLLM_ARGS[@]}" "$@" 2>&1 | tee "${RUN_DIR}.log"
