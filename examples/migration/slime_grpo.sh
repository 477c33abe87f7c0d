#!/bin/bash
# A launch script of slime's kind: GRPO on mathematics, eight GPUs shared by Megatron and SGLang.

pkill -9 sglang
ray stop --force
pkill -9 python
sleep 3

set -ex
export PYTHONUNBUFFERED=1

LINKS=$(nvidia-smi topo -m | grep -o 'NV[0-9]' | wc -l)
if [ "$LINKS" -gt 0 ]; then
    NVLS=1
else
    NVLS=0
fi

HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/models/qwen3_4b.sh"

CKPT_ARGS=(
    --hf-checkpoint /data/Qwen3-4B
    # --hf-checkpoint /data/Qwen3-4B-FP8
    --ref-load /data/Qwen3-4B_torch_dist
    --load /data/runs/qwen3-4b/
    --save /data/runs/qwen3-4b/
    --save-interval 20
)

ROLLOUT_ARGS=(
    --prompt-data /data/math/train.jsonl
    --input-key question
    --label-key answer
    --apply-chat-template
    --rollout-shuffle
    --rm-type deepscaler
    --num-rollout 2000
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 8192
    --rollout-temperature 0.9
    --global-batch-size 256
    --balance-data
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    --over-sampling-batch-size 64
)

EVAL_ARGS=(
    --eval-interval 10
    --eval-prompt-data held_out /data/math/test.jsonl
    --n-samples-per-eval-prompt 4
    --eval-max-response-len 16384
    --eval-top-p 0.8
)

PERF_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --use-kl-loss
    --kl-loss-coef 0.00
    --kl-loss-type low_var_kl
    --eps-clip 0.2
    --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
    --sglang-max-running-requests 256
    --sglang-schedule-policy lpm
)

MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)

export MASTER_ADDR=${MASTER_ADDR:-"127.0.0.1"}
ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus 8 --disable-usage-stats

ENVIRONMENT="{
  \"env_vars\": {
    \"PYTHONPATH\": \"/opt/Megatron-LM/\",
    \"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\",
    \"NCCL_NVLS_ENABLE\": \"${NVLS}\"
  }
}"

ray job submit --address="http://127.0.0.1:8265" \
    --runtime-env-json="${ENVIRONMENT}" \
    -- python3 train.py \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node 8 \
    --colocate \
    ${MODEL_ARGS[@]} \
    ${CKPT_ARGS[@]} \
    ${ROLLOUT_ARGS[@]} \
    ${OPTIMIZER_ARGS[@]} \
    ${GRPO_ARGS[@]} \
    ${PERF_ARGS[@]} \
    ${EVAL_ARGS[@]} \
    ${SGLANG_ARGS[@]} \
    ${MISC_ARGS[@]}
