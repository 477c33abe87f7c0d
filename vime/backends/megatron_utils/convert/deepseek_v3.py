"""DeepSeek V3 and R1: latent attention, sigmoid routing with a selection bias, a shared expert. The layers for multi-token prediction
are trained with --enable-mtp-training, else carried: written unchanged into exports."""

from __future__ import annotations

from dataclasses import replace

from vime.backends.megatron_utils.convert.decoder import decoder_ops
from vime.backends.megatron_utils.convert.family import Family
from vime.backends.megatron_utils.convert.fields import Fields
from vime.backends.megatron_utils.convert.shape import ExpertShape, LatentShape, ModelShape, PredictionShape, common_shape
from vime.errors import CheckpointError

__all__ = ["FAMILY"]


def _shape(fields: Fields) -> ModelShape:
    shape = common_shape(fields, qk_norm=True, qkv_bias=False)
    fields.only("rope_interleave", True)
    fields.ignore("head_dim", "qk_head_dim", "ep_size", "seq_aux", "aux_loss_alpha")  # sums of others, or for training alone
    latent = LatentShape(
        query_rank=int(fields.get("q_lora_rank")),
        key_rank=int(fields.get("kv_lora_rank")),
        plain_dim=int(fields.get("qk_nope_head_dim")),
        rope_dim=int(fields.get("qk_rope_head_dim")),
        value_dim=int(fields.get("v_head_dim")),
    )
    extra = int(fields.get("num_nextn_predict_layers", 0))
    first = shape.num_layers
    return replace(
        shape,
        prediction=_prediction(first) if extra == 1 else None,
        head_dim=latent.plain_dim + latent.rope_dim,
        latent=latent,
        experts=_experts(fields, shape.num_layers),
        carried=tuple(f"model.layers.{first + i}." for i in range(extra)),
    )


def _prediction(number: int) -> PredictionShape:
    """The layer `number`, which is the one after the last."""
    prefix = f"model.layers.{number}."
    return PredictionShape(
        layers=1,
        embedding_norm=f"{prefix}enorm.weight",
        hidden_norm=f"{prefix}hnorm.weight",
        join=f"{prefix}eh_proj.weight",
        norm=f"{prefix}shared_head.norm.weight",
        inner=prefix,
        copies={f"{prefix}embed_tokens.weight": "model.embed_tokens.weight", f"{prefix}shared_head.head.weight": "lm_head.weight"},
    )


def _experts(fields: Fields, num_layers: int) -> ExpertShape:
    get = fields.get
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("moe_layer_freq", 1)
    fields.only("norm_topk_prob", True, why="Megatron always lets the weights of sigmoid routing sum to 1.")
    size, top, groups, top_groups = (int(get(key)) for key in ("moe_intermediate_size", "num_experts_per_tok", "n_group", "topk_group"))
    if groups > 1 and top // top_groups != 2:
        raise CheckpointError(
            f"{fields.path}: num_experts_per_tok {top} with topk_group {top_groups} is not supported: Megatron scores a group by its best "
            f"{top // top_groups} experts, this model by its best 2."
        )
    return ExpertShape(
        num_experts=int(get("n_routed_experts")),
        top_k=top,
        ffn_size=size,
        layers=tuple(i >= int(get("first_k_dense_replace")) for i in range(num_layers)),
        normalised=True,
        sigmoid=True,
        selection_bias=True,
        num_limited=groups if groups > 1 else None,
        top_limited=top_groups if groups > 1 else None,
        scaling=float(get("routed_scaling_factor")),
        shared_ffn_size=size * int(get("n_shared_experts", 0)),
        shared_name="shared_experts",
    )


FAMILY = Family(architecture="DeepseekV3ForCausalLM", shape=_shape, ops=decoder_ops)
