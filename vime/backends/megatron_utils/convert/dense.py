"""The op list that dense Llama-like decoders share; families differ in two switches of `ModelShape`."""

from __future__ import annotations

from vime.backends.megatron_utils.convert.ops import QKV, Copy, GateUp, Op, Shard, Vocabulary
from vime.backends.megatron_utils.convert.shape import ModelShape

__all__ = ["dense_ops"]


def dense_ops(shape: ModelShape, padded_vocab_size: int) -> list[Op]:
    """All parameters of the model, in the order in which they are loaded and sent."""
    hidden, vocab = shape.hidden_size, (shape.vocab_size, shape.hidden_size)
    ops: list[Op] = [
        Vocabulary(
            megatron="embedding.word_embeddings.weight", hf=("model.embed_tokens.weight",), hf_shapes=(vocab,), padded=padded_vocab_size
        )
    ]
    for layer in range(shape.num_layers):
        ops += _layer_ops(shape, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    ops.append(Copy(megatron="decoder.final_layernorm.weight", hf=("model.norm.weight",), hf_shapes=((hidden,),)))
    if not shape.tied:
        ops.append(Vocabulary(megatron="output_layer.weight", hf=("lm_head.weight",), hf_shapes=(vocab,), padded=padded_vocab_size))
    return ops


def _layer_ops(shape: ModelShape, ours: str, theirs: str) -> list[Op]:
    hidden, ffn, head = shape.hidden_size, shape.ffn_size, shape.head_dim
    query, key = shape.num_heads * head, shape.num_groups * head
    attention, mlp = theirs + "self_attn.", theirs + "mlp."

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
    ops += [
        Shard(megatron=f"{ours}self_attention.linear_proj.weight", hf=(f"{attention}o_proj.weight",), hf_shapes=((hidden, query),), dim=1),
        norm("pre_mlp_layernorm", "post_attention_layernorm", hidden),
        GateUp(
            megatron=f"{ours}mlp.linear_fc1.weight",
            hf=(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
            hf_shapes=((ffn, hidden), (ffn, hidden)),
        ),
        Shard(megatron=f"{ours}mlp.linear_fc2.weight", hf=(f"{mlp}down_proj.weight",), hf_shapes=((hidden, ffn),), dim=1),
    ]
    return ops
