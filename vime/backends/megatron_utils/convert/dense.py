"""The op list that Llama-like decoders share, with an MLP or experts in each layer; families differ in switches of `ModelShape`."""

from __future__ import annotations

from vime.backends.megatron_utils.convert.ops import QKV, Copy, GateUp, Op, Shard, Vocabulary
from vime.backends.megatron_utils.convert.shape import ExpertShape, ModelShape

__all__ = ["dense_ops", "expert_ops", "mlp_ops"]


def dense_ops(shape: ModelShape, padded_vocab_size: int) -> list[Op]:
    """All parameters of the model, in the order in which they are loaded and sent."""
    hidden, vocab = shape.hidden_size, (shape.vocab_size, shape.hidden_size)
    ops: list[Op] = [
        Vocabulary(
            megatron="embedding.word_embeddings.weight", hf=("model.embed_tokens.weight",), hf_shapes=(vocab,), padded=padded_vocab_size
        )
    ]
    for layer in range(shape.num_layers):
        ops += _layer_ops(shape, layer)
    ops.append(Copy(megatron="decoder.final_layernorm.weight", hf=("model.norm.weight",), hf_shapes=((hidden,),)))
    if not shape.tied:
        ops.append(Vocabulary(megatron="output_layer.weight", hf=("lm_head.weight",), hf_shapes=(vocab,), padded=padded_vocab_size))
    return ops


def _layer_ops(shape: ModelShape, layer: int) -> list[Op]:
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    hidden, head = shape.hidden_size, shape.head_dim
    query, key = shape.num_heads * head, shape.num_groups * head
    attention = theirs + "self_attn."

    def qkv(kind: str, tail: tuple[int, ...]) -> QKV:
        return QKV(
            megatron=f"{ours}self_attention.linear_qkv.{kind}",
            hf=tuple(f"{attention}{name}_proj.{kind}" for name in "qkv"),
            hf_shapes=((query, *tail), (key, *tail), (key, *tail)),
            groups=shape.num_groups,
            head_dim=head,
        )

    def norm(megatron: str, hf: str, size: int) -> Copy:
        return Copy(megatron=f"{ours}{megatron}.weight", hf=(f"{theirs}{hf}.weight",), hf_shapes=((size,),))

    ops: list[Op] = [norm("input_layernorm", "input_layernorm", hidden), qkv("weight", (hidden,))]
    if shape.qkv_bias:
        ops.append(qkv("bias", ()))
    if shape.qk_norm:
        ops += [norm(f"self_attention.{name}_layernorm", f"self_attn.{name}_norm", head) for name in "qk"]
    ops.append(
        Shard(megatron=f"{ours}self_attention.linear_proj.weight", hf=(f"{attention}o_proj.weight",), hf_shapes=((hidden, query),), dim=1)
    )
    ops.append(norm("pre_mlp_layernorm", "post_attention_layernorm", hidden))
    if shape.experts is not None and shape.experts.layers[layer]:
        return ops + expert_ops(shape.experts, hidden, ours + "mlp.", theirs + "mlp.")
    return ops + mlp_ops(hidden, shape.ffn_size, ours + "mlp.", theirs + "mlp.")


def mlp_ops(hidden: int, ffn: int, ours: str, theirs: str, *, is_expert: bool = False) -> list[Op]:
    """A SwiGLU MLP; `ours` and `theirs` are what its names begin with."""
    return [
        GateUp(
            megatron=f"{ours}linear_fc1.weight",
            hf=(f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight"),
            hf_shapes=((ffn, hidden), (ffn, hidden)),
            is_expert=is_expert,
        ),
        Shard(
            megatron=f"{ours}linear_fc2.weight", hf=(f"{theirs}down_proj.weight",), hf_shapes=((hidden, ffn),), dim=1, is_expert=is_expert
        ),
    ]


def expert_ops(experts: ExpertShape, hidden: int, ours: str, theirs: str) -> list[Op]:
    """The router and the experts of one layer."""
    ops: list[Op] = [Copy(megatron=f"{ours}router.weight", hf=(f"{theirs}gate.weight",), hf_shapes=((experts.num_experts, hidden),))]
    for i in range(experts.num_experts):
        ops += mlp_ops(hidden, experts.ffn_size, f"{ours}experts.local_experts.{i}.", f"{theirs}experts.{i}.", is_expert=True)
    return ops
