# The shape of Qwen3-4B, typed by hand for Megatron, as slime and Vime want it.
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 2560
    --ffn-hidden-size 9728
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --qk-layernorm
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --use-rotary-position-embeddings
    --rotary-base "${ROTARY_BASE:-1000000}"
    --vocab-size 151936
)
