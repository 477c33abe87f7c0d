"""The op list that all decoders share. Each layer has the attention and the MLP or experts that `ModelShape` says; families differ
in that shape and, where their folders name or order tensors in their own way, in an op of their own."""

from __future__ import annotations

from collections.abc import Callable

from vime.backends.megatron_utils.convert.ops import QKV, Copy, GatedQKV, GateUp, Op, Sections, Shard, Vocabulary
from vime.backends.megatron_utils.convert.shape import DeltaShape, ExpertShape, LatentShape, ModelShape, PredictionShape
from vime.backends.megatron_utils.layer_probe import has_transformer_engine

__all__ = ["decoder_ops", "delta_ops", "delta_rest"]

DeltaOps = Callable[[DeltaShape, int, str, str], list[Op]]


def decoder_ops(shape: ModelShape, padded_vocab_size: int, *, delta: DeltaOps | None = None) -> list[Op]:
    """All parameters of the model, in the order in which they are loaded and sent. `delta`: the ops of a linear attention layer."""
    hidden, vocab = shape.hidden_size, (shape.vocab_size, shape.hidden_size)
    ops: list[Op] = [
        Vocabulary(
            megatron="embedding.word_embeddings.weight",
            hf=(f"{shape.prefix}embed_tokens.weight",),
            hf_shapes=(vocab,),
            padded=padded_vocab_size,
        )
    ]
    for layer in range(shape.num_layers):
        linear = (delta or delta_ops) if shape.delta is not None and shape.delta.layers[layer] else None
        mixed = shape.experts is not None and shape.experts.layers[layer]
        ops += _layer_ops(shape, f"decoder.layers.{layer}.", f"{shape.prefix}layers.{layer}.", linear=linear, mixed=mixed)
    ops.append(_copy("decoder.final_layernorm.weight", f"{shape.prefix}norm.weight", hidden))
    if not shape.tied:
        ops.append(Vocabulary(megatron="output_layer.weight", hf=("lm_head.weight",), hf_shapes=(vocab,), padded=padded_vocab_size))
    if shape.predicts:
        assert shape.prediction is not None
        for layer in range(shape.prediction.layers):
            ops += _prediction_ops(shape, shape.prediction, layer)
    return ops


def _layer_ops(shape: ModelShape, ours: str, theirs: str, *, linear: DeltaOps | None, mixed: bool) -> list[Op]:
    """One decoder layer: with linear attention where `linear` makes its ops, with experts where it is `mixed`."""
    hidden = shape.hidden_size
    ops: list[Op] = [_copy(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight", hidden)]
    if linear is not None:
        assert shape.delta is not None
        ops += linear(shape.delta, hidden, ours + "self_attention.", theirs + "linear_attn.")
    elif shape.latent is not None:
        ops += _latent_ops(shape, shape.latent, ours + "self_attention.", theirs + "self_attn.")
    else:
        ops += _attention_ops(shape, ours + "self_attention.", theirs + "self_attn.")
    ops.append(_copy(f"{ours}pre_mlp_layernorm.weight", f"{theirs}post_attention_layernorm.weight", hidden))
    if mixed:
        assert shape.experts is not None
        ops += _expert_ops(shape.experts, hidden, ours + "mlp.", theirs + "mlp.")
    else:
        ops += _mlp_ops(hidden, shape.ffn_size, ours + "mlp.", theirs + "mlp.")
    return ops


def _prediction_ops(shape: ModelShape, names: PredictionShape, layer: int) -> list[Op]:
    """One layer for multi-token prediction; the decoder layer in it is as the model's last, with full attention."""
    hidden, ours = shape.hidden_size, f"mtp.layers.{layer}."

    def theirs(name: str) -> str:
        return name.format(layer=layer)

    return [
        _copy(f"{ours}enorm.weight", theirs(names.embedding_norm), hidden),
        _copy(f"{ours}hnorm.weight", theirs(names.hidden_norm), hidden),
        _shard(f"{ours}eh_proj.weight", theirs(names.join), hidden, 2 * hidden, dim=0),
        *_layer_ops(
            shape, f"{ours}mtp_model_layer.", theirs(names.inner), linear=None, mixed=shape.experts is not None and shape.experts.layers[-1]
        ),
        _copy(f"{ours}final_layernorm.weight", theirs(names.norm), hidden),
    ]


def _copy(megatron: str, hf: str, *size: int) -> Copy:
    return Copy(megatron=megatron, hf=(hf,), hf_shapes=(size,))


def _shard(megatron: str, hf: str, *size: int, dim: int, is_expert: bool = False) -> Shard:
    return Shard(megatron=megatron, hf=(hf,), hf_shapes=(size,), dim=dim, is_expert=is_expert)


def _attention_ops(shape: ModelShape, ours: str, theirs: str) -> list[Op]:
    """Attention by heads in groups, with biases, norms and a gate where the shape has them."""
    hidden, head = shape.hidden_size, shape.head_dim
    query, key = shape.num_heads * head, shape.num_groups * head

    def qkv(kind: str, tail: tuple[int, ...]) -> Op:
        return (GatedQKV if shape.output_gate else QKV)(
            megatron=f"{ours}linear_qkv.{kind}",
            hf=tuple(f"{theirs}{name}_proj.{kind}" for name in "qkv"),
            hf_shapes=((query * (2 if shape.output_gate else 1), *tail), (key, *tail), (key, *tail)),
            groups=shape.num_groups,
            head_dim=head,
        )

    ops = [qkv("weight", (hidden,))]
    if shape.qkv_bias:
        ops.append(qkv("bias", ()))
    if shape.qk_norm:
        ops += [_copy(f"{ours}{name}_layernorm.weight", f"{theirs}{name}_norm.weight", head) for name in "qk"]
    return [*ops, _shard(f"{ours}linear_proj.weight", f"{theirs}o_proj.weight", hidden, query, dim=1)]


def _latent_ops(shape: ModelShape, latent: LatentShape, ours: str, theirs: str) -> list[Op]:
    """Multi-head latent attention (arXiv:2405.04434, section 2.1)."""
    hidden, heads = shape.hidden_size, shape.num_heads

    def down(megatron: str, hf: str, size: int) -> Op:  # Transformer Engine's layers keep it whole on every rank
        names = (f"{ours}{megatron}.weight", f"{theirs}{hf}.weight", size, hidden)
        return _copy(*names) if has_transformer_engine() else _shard(*names, dim=0)

    query_head, value_head = latent.plain_dim + latent.rope_dim, latent.plain_dim + latent.value_dim
    return [
        down("linear_q_down_proj", "q_a_proj", latent.query_rank),
        _copy(f"{ours}q_layernorm.weight", f"{theirs}q_a_layernorm.weight", latent.query_rank),
        _shard(f"{ours}linear_q_up_proj.weight", f"{theirs}q_b_proj.weight", heads * query_head, latent.query_rank, dim=0),
        down("linear_kv_down_proj", "kv_a_proj_with_mqa", latent.key_rank + latent.rope_dim),
        _copy(f"{ours}kv_layernorm.weight", f"{theirs}kv_a_layernorm.weight", latent.key_rank),
        _shard(f"{ours}linear_kv_up_proj.weight", f"{theirs}kv_b_proj.weight", heads * value_head, latent.key_rank, dim=0),
        _shard(f"{ours}linear_proj.weight", f"{theirs}o_proj.weight", hidden, heads * latent.value_dim, dim=1),
    ]


def delta_ops(delta: DeltaShape, hidden: int, ours: str, theirs: str) -> list[Op]:
    """A gated delta net (arXiv:2412.06464), its input projection in four tensors: queries, keys and values; z; b; a."""
    key, value = delta.num_keys * delta.key_dim, delta.num_values * delta.value_dim
    parts = {"in_proj_qkv": 2 * key + value, "in_proj_z": value, "in_proj_b": delta.num_values, "in_proj_a": delta.num_values}
    project = Sections(
        megatron=f"{ours}in_proj.weight",
        hf=tuple(f"{theirs}{name}.weight" for name in parts),
        hf_shapes=tuple((rows, hidden) for rows in parts.values()),
        sections=(key, key, value, value, delta.num_values, delta.num_values),
    )
    return [project, *delta_rest(delta, hidden, ours, theirs)]


def delta_rest(delta: DeltaShape, hidden: int, ours: str, theirs: str) -> list[Op]:
    """What a gated delta net has beside its input projection."""
    key, value = delta.num_keys * delta.key_dim, delta.num_values * delta.value_dim
    return [
        Sections(
            megatron=f"{ours}conv1d.weight",
            hf=(f"{theirs}conv1d.weight",),
            hf_shapes=((2 * key + value, 1, delta.kernel),),
            sections=(key, key, value),
        ),
        _shard(f"{ours}dt_bias", f"{theirs}dt_bias", delta.num_values, dim=0),
        _shard(f"{ours}A_log", f"{theirs}A_log", delta.num_values, dim=0),
        _copy(f"{ours}out_norm.weight", f"{theirs}norm.weight", delta.value_dim),
        _shard(f"{ours}out_proj.weight", f"{theirs}out_proj.weight", hidden, value, dim=1),
    ]


def _mlp_ops(hidden: int, ffn: int, ours: str, theirs: str, *, is_expert: bool = False) -> list[Op]:
    """A SwiGLU MLP; `ours` and `theirs` are what its names begin with."""
    return [
        GateUp(
            megatron=f"{ours}linear_fc1.weight",
            hf=(f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight"),
            hf_shapes=((ffn, hidden), (ffn, hidden)),
            is_expert=is_expert,
        ),
        _shard(f"{ours}linear_fc2.weight", f"{theirs}down_proj.weight", hidden, ffn, dim=1, is_expert=is_expert),
    ]


def _expert_ops(experts: ExpertShape, hidden: int, ours: str, theirs: str) -> list[Op]:
    """The router, the experts, and the MLP that all tokens share, of one layer."""
    ops: list[Op] = [_copy(f"{ours}router.weight", f"{theirs}gate.weight", experts.num_experts, hidden)]
    if experts.selection_bias:
        ops.append(_copy(f"{ours}router.expert_bias", f"{theirs}gate.e_score_correction_bias", experts.num_experts))
    for i in range(experts.num_experts):
        ops += _mlp_ops(hidden, experts.ffn_size, f"{ours}experts.local_experts.{i}.", f"{theirs}experts.{i}.", is_expert=True)
    if experts.shared_ffn_size:
        ops += _mlp_ops(hidden, experts.shared_ffn_size, f"{ours}shared_experts.", f"{theirs}{experts.shared_name}.")
    if experts.shared_gate:
        ops.append(_copy(f"{ours}shared_experts.gate_weight", f"{theirs}{experts.shared_name}_gate.weight", 1, hidden))
    return ops
