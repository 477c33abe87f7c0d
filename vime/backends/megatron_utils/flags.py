"""Which of Megatron's arguments this trainer honours, which it cannot honour yet, and which belong to other programs.

Names are Megatron's destinations (attribute names). A flag that would be parsed and ignored is refused instead.
"""

from __future__ import annotations

import math

__all__ = ["BOUNDS", "CURES", "HONOURED", "NOT_YET_PREFIXES", "OF_EXPERTS", "VALUES"]

SHAPE = frozenset(
    "num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups kv_channels normalization "
    "layernorm_epsilon swiglu add_bias_linear add_qkv_bias qk_layernorm position_embedding_type use_rotary_position_embeddings "
    "rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor "
    "untie_embeddings_and_output_weights max_position_embeddings vocab_size padded_vocab_size make_vocab_size_divisible_by "
    "layernorm_zero_centered_gamma add_position_embedding num_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk "
    "moe_router_score_function moe_router_pre_softmax moe_router_enable_expert_bias moe_router_num_groups moe_router_group_topk "
    "moe_router_topk_scaling_factor moe_router_dtype moe_shared_expert_intermediate_size moe_shared_expert_gate multi_latent_attention "
    "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_scaling_factor mscale mscale_all_dim "
    "attention_output_gate experimental_attention_variant linear_attention_freq linear_conv_kernel_dim linear_key_head_dim "
    "linear_value_head_dim linear_num_key_heads linear_num_value_heads".split()
)
PARALLEL = frozenset(
    "tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
    "expert_tensor_parallel_size use_distributed_optimizer overlap_grad_reduce overlap_param_gather ddp_bucket_size ddp_num_buckets "
    "accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16 use_cpu_initialization num_layers_per_virtual_pipeline_stage "
    "num_virtual_stages_per_pipeline_rank decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers overlap_p2p_comm".split()
)
OPTIMIZER = frozenset(
    "optimizer weight_decay start_weight_decay end_weight_decay weight_decay_incr_style apply_wd_to_qk_layernorm adam_beta1 adam_beta2 "
    "adam_eps clip_grad lr min_lr decoupled_lr decoupled_min_lr lr_decay_style lr_decay_iters lr_warmup_iters "
    "lr_warmup_fraction lr_warmup_init lr_wsd_decay_style lr_wsd_decay_iters train_iters override_opt_param_scheduler "
    "use_checkpoint_opt_param_scheduler check_for_nan_in_loss_and_grad".split()
)
COMPUTE = frozenset(
    "seed bf16 attention_dropout hidden_dropout recompute_granularity recompute_method recompute_num_layers recompute_modules "
    "recompute_activations distribute_saved_activations attention_softmax_in_fp32 attention_backend "
    "deterministic_mode fp32_residual_connection transformer_impl masked_softmax_fusion bias_gelu_fusion bias_swiglu_fusion "
    "bias_dropout_fusion apply_rope_fusion gradient_accumulation_fusion no_persist_layer_norm".split()
)
EXPERTS = frozenset(
    "moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_router_dtype moe_router_bias_update_rate moe_grouped_gemm "
    "moe_token_dispatcher_type moe_permute_fusion".split()
)
OF_EXPERTS: frozenset[str] = EXPERTS | {"expert_model_parallel_size", "expert_tensor_parallel_size"}  # without experts nothing reads them
HONOURED: frozenset[str] = SHAPE | PARALLEL | OPTIMIZER | COMPUTE | EXPERTS

VALUES: dict[str, tuple[tuple[str, ...], str]] = {  # (values that are honoured, what to know about the others)
    "optimizer": (("adam",), "The distributed optimizer, which this trainer always uses, can save and resume Adam's state only."),
    "moe_router_load_balancing_type": (("aux_loss", "global_aux_loss", "none"), "A pack of several sequences would count as one sequence."),
    "moe_token_dispatcher_type": (("alltoall",), "It is the one that takes as many tokens as each rank has."),
    "attention_backend": (("auto", "flash"), "Packed sequences go through flash attention (on a CPU, through torch's SDPA)."),
}

_BOUNDED = {  # (lowest, highest) -> the arguments whose values, or each of them, must lie between; Megatron's parser takes any number
    (1, math.inf): "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
    "expert_tensor_parallel_size num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers ddp_bucket_size ddp_num_buckets recompute_num_layers "
    "lr_decay_iters lr_wsd_decay_iters train_iters make_vocab_size_divisible_by",
    (0, math.inf): "weight_decay start_weight_decay end_weight_decay adam_eps min_lr decoupled_lr decoupled_min_lr lr_warmup_iters "
    "lr_warmup_init moe_aux_loss_coeff moe_z_loss_coeff moe_router_bias_update_rate",
    (0, 1): "adam_beta1 adam_beta2 lr_warmup_fraction attention_dropout hidden_dropout",
}
BOUNDS: dict[str, tuple[float, float]] = {name: bounds for bounds, names in _BOUNDED.items() for name in names.split()}

NOT_YET_PREFIXES: tuple[str, ...] = tuple(  # kinds of model or of training that Megatron can do and this trainer does not build yet
    "num_experts moe_ expert_ mtp_ multi_latent q_lora kv_lora qk_head qk_pos v_head mla_ mamba_ hybrid_ is_hybrid dsa_ linear_ "
    "experimental_attention pipeline_model_parallel_layout "
    "account_for hierarchical_context cp_comm fp8 fp4 use_megatron_fsdp use_torch_fsdp2 data_parallel_sharding optimizer_cpu "
    "use_precision_aware exp_avg main_params main_grads muon_ lion_ tp_comm cuda_graph enable_cuda_graph external_cuda_graph "
    "num_distributed_optimizer overlap_p2p_comm_warmup overlap_moe overlap_param_gather_with qk_clip qk_l2 window_ softmax_type rope_type "
    "yarn_ rotary_scaling mrope no_rope_freq fine_grained cpu_offloading heterogeneous spec init_method use_mup tensor_parallel_num".split()
)

CURES: dict[str, str] = {
    "apply_query_key_layer_scaling": "It guards a float16 softmax; here the softmax is computed in float32.",
    "distributed_timeout_minutes": "Say --actor-deadline, in seconds: it bounds collectives, too.",
    "sgd_momentum": "The optimizer is Adam: say --adam-beta1.",
    "fp16": "float16 is not offered: say --bf16, or leave it to the platform (float32 on a CPU).",
    "micro_batch_size": "--micro-batch-size is ours: give it once.",
    "global_batch_size": "--global-batch-size is ours: give it once.",
    "seq_length": "Sequences are packed at their own length; --max-tokens-per-gpu bounds a micro-batch.",
    "train_samples": "Count in optimizer steps: --lr-decay-iters, --lr-warmup-iters.",
    "lr_decay_samples": "Say --lr-decay-iters, in optimizer steps.",
    "lr_warmup_samples": "Say --lr-warmup-iters, in optimizer steps.",
    "lr_wsd_decay_samples": "Say --lr-wsd-decay-iters, in optimizer steps.",
    "ckpt_format": "Checkpoints are always torch_dist, fully reshardable.",
    "tokenizer_type": "The tokenizer is the one in --hf-checkpoint.",
    "tokenizer_model": "The tokenizer is the one in --hf-checkpoint.",
    "finetune": "--load of another run begins anew by itself; say --no-load-optim to leave out its moments, too.",
    "no_load_rng": "--load of another run takes no random states; a run that resumes must equal an uninterrupted one.",
    "no_save_rng": "A checkpoint always holds the random states: a resumed run must equal an uninterrupted one.",
    "no_save_optim": "A checkpoint always holds the optimizer: a resumed run must equal an uninterrupted one.",
}
