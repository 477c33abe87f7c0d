"""The shape of a model, read from the config.json of its Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from vime.backends.megatron_utils.convert.fields import Fields
from vime.errors import CheckpointError, ConfigError

__all__ = [
    "DeltaShape", "ExpertShape", "LatentShape", "ModelShape", "PredictionShape", "common_shape", "hybrid_shape", "qwen_prediction",
    "softmax_experts", "with_prediction",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The mixtures of experts of a model."""

    num_experts: int
    top_k: int
    ffn_size: int  # of one expert
    layers: tuple[bool, ...]  # which layers are mixtures; the others are dense
    normalised: bool  # the weights of a token's chosen experts sum to 1
    sigmoid: bool = False  # scores are sigmoids, not a softmax
    selection_bias: bool = False  # experts are chosen by score plus a bias that is no part of their weight
    num_limited: int | None = None  # the experts stand in so many groups, of which
    top_limited: int | None = None  # a token takes its experts from this many
    scaling: float | None = None  # of the weights
    shared_ffn_size: int = 0  # of the MLP that all tokens go through
    shared_name: str = "shared_expert"
    shared_gate: bool = False  # a sigmoid gate scales its output


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Multi-head latent attention: queries, and keys with values, go through a narrow projection."""

    query_rank: int
    key_rank: int
    plain_dim: int  # of a head, without position
    rope_dim: int  # of a head, rotated
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Gated delta nets, which stand in place of attention in some layers."""

    layers: tuple[bool, ...]
    num_keys: int  # heads
    num_values: int
    key_dim: int  # of a head
    value_dim: int
    kernel: int  # of the convolution


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionShape:
    """Layers for multi-token prediction: each joins a position's state with the embedding of the token that comes next, and predicts the
    one after it through the model's own output layer (arXiv:2412.19437, section 2.2). Names hold {layer}, from 0."""

    layers: int
    embedding_norm: str
    hidden_norm: str
    join: str  # [hidden, 2 x hidden]: of the embedding and the state
    norm: str  # before the output layer
    inner: str  # what the names of the decoder layer in it begin with
    copies: Mapping[str, str] = MappingProxyType({})  # names under which a folder holds the embedding and the output layer once more


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What Megatron needs to know to build a decoder. Sizes are of the whole model, before tensor parallelism."""

    architecture: str  # "Qwen3ForCausalLM"
    path: str  # of config.json, for messages
    num_layers: int
    hidden_size: int
    num_heads: int
    num_groups: int  # key/value heads
    head_dim: int
    ffn_size: int  # of a dense layer
    vocab_size: int  # without padding
    norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any]  # rope_type, factor, ... ; rope_type "default" for none
    max_positions: int
    tied: bool  # the output layer is the embedding
    attention_dropout: float
    qk_norm: bool  # RMSNorm on each head of queries and keys
    qkv_bias: bool
    experts: ExpertShape | None = None  # None: all layers are dense
    latent: LatentShape | None = None  # None: attention by heads in groups
    delta: DeltaShape | None = None  # None: attention in all layers
    output_gate: bool = False  # attention's output is scaled by a sigmoid of its input
    unit_norms: bool = False  # norms multiply by 1 + weight
    rotary_part: float = 1.0  # of a head that is rotated
    prefix: str = "model."  # what the names in the folder begin with
    carried: tuple[str, ...] = ()  # beginnings of names of tensors that are not trained; exports take them over unchanged
    prediction: PredictionShape | None = None  # layers for multi-token prediction that the folder may hold
    predicts: bool = False  # they are trained; else they are carried

    @property
    def copies(self) -> Mapping[str, str]:
        """Names under which a folder holds another trained tensor once more, and that one's name."""
        return self.prediction.copies if self.predicts and self.prediction is not None else {}


def common_shape(
    fields: Fields, *, qk_norm: bool, qkv_bias: bool, needs_head_dim: bool = False, mixers: tuple[str, ...] = ("full_attention",)
) -> ModelShape:
    """The fields that all families name alike. `mixers`: the layer types that the family has.

    Raises CheckpointError for what is missing or not supported.
    """
    get, only = fields.get, fields.only
    only("hidden_act", "silu")
    only("use_sliding_window", False, why="Set it to false if the trained contexts are shorter than the window.")
    if "use_sliding_window" in fields:
        fields.ignore("sliding_window")  # it is off
    num_layers = int(get("num_hidden_layers"))
    if other := sorted(set(get("layer_types", [])) - set(mixers)):
        raise CheckpointError(f"{fields.path}: layer_types {other} are not supported (only {', '.join(mixers)}).")
    for key in ("mlp_bias", "attention_bias"):
        only(key, False, why="It puts biases where Megatron's layer has none.")
    heads, hidden = int(get("num_attention_heads")), int(get("hidden_size"))
    theta, scaling = _rope(fields)
    return ModelShape(
        architecture=fields.architecture,
        path=fields.path,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_groups=int(get("num_key_value_heads", heads)),
        head_dim=int(get("head_dim") if needs_head_dim else get("head_dim", hidden // heads)),
        ffn_size=int(get("intermediate_size", 4 * hidden) if "moe_intermediate_size" in fields else get("intermediate_size")),
        vocab_size=int(get("vocab_size")),
        norm_eps=float(get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=int(get("max_position_embeddings")),
        tied=bool(get("tie_word_embeddings", False)),
        attention_dropout=float(get("attention_dropout", 0.0)),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
    )


def _rope(fields: Fields) -> tuple[float, Mapping[str, Any]]:
    """(theta, the other keys of rope_parameters or, before transformers 5, rope_scaling)."""
    scaling = {**fields.get("rope_scaling", {}), **fields.get("rope_parameters", {})}
    scaling.setdefault("rope_type", scaling.pop("type", "default"))
    theta = float(fields.get("rope_theta", 10000.0))
    return float(scaling.pop("rope_theta", None) or theta), MappingProxyType(scaling)


def hybrid_shape(fields: Fields) -> ModelShape:
    """Qwen's decoders in which most layers are gated delta nets; without their experts."""
    get = fields.get
    shape = common_shape(fields, qk_norm=True, qkv_bias=False, needs_head_dim=True, mixers=("linear_attention", "full_attention"))
    every = int(get("full_attention_interval", 4))
    types = get("layer_types", ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(shape.num_layers)])
    rotary = {key: value for key, value in shape.rope_scaling.items() if not key.startswith("mrope_")}  # of images; text has one position
    part = float(rotary.pop("partial_rotary_factor", get("partial_rotary_factor", 0.25)))
    delta = DeltaShape(
        layers=tuple(kind == "linear_attention" for kind in types),
        num_keys=int(get("linear_num_key_heads")),
        num_values=int(get("linear_num_value_heads")),
        key_dim=int(get("linear_key_head_dim")),
        value_dim=int(get("linear_value_head_dim")),
        kernel=int(get("linear_conv_kernel_dim")),
    )
    return replace(shape, delta=delta, output_gate=True, unit_norms=True, rotary_part=part, rope_scaling=MappingProxyType(rotary))


def softmax_experts(fields: Fields, *, shared: bool = False, normalised: bool = False) -> ExpertShape:
    """Experts chosen by softmax, as Qwen names them. `shared`: with an MLP for all tokens, and its gate; `normalised`: the
    default for norm_topk_prob."""
    get = fields.get
    step, dense = int(get("decoder_sparse_step", 1)), set(get("mlp_only_layers", []))
    return ExpertShape(
        num_experts=int(get("num_experts", 0) or get("num_local_experts")),  # transformers 5 writes the second name
        top_k=int(get("num_experts_per_tok")),
        ffn_size=int(get("moe_intermediate_size")),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(int(get("num_hidden_layers")))),
        normalised=bool(get("norm_topk_prob", normalised)),
        shared_ffn_size=int(get("shared_expert_intermediate_size")) if shared else 0,
        shared_gate=shared,
    )


def qwen_prediction(layers: int) -> PredictionShape | None:
    """Multi-token prediction as Qwen names it; the layers stand one in the other, of which one is known."""
    if layers != 1:
        return None
    return PredictionShape(
        layers=1,
        embedding_norm="mtp.pre_fc_norm_embedding.weight",
        hidden_norm="mtp.pre_fc_norm_hidden.weight",
        join="mtp.fc.weight",
        norm="mtp.norm.weight",
        inner="mtp.layers.{layer}.",
    )


def with_prediction(shape: ModelShape, layers: int | None) -> ModelShape:
    """The shape with its layers for multi-token prediction trained. `layers`: how many the user says there are.

    Raises ConfigError when the model has none, or another number.
    """
    found = 0 if shape.prediction is None else shape.prediction.layers
    if not found:
        raise ConfigError(
            f"--enable-mtp-training: {shape.path} is of a model whose layers for multi-token prediction are not known. Leave it out."
        )
    if layers is not None and layers != found:
        raise ConfigError(f"--mtp-num-layers {layers} contradicts {shape.path}, which says {found}. Leave the flag out.")
    assert shape.prediction is not None
    inside = [shape.prediction.inner.format(layer=i) for i in range(found)]
    rest = tuple(name for name in shape.carried if not any(part.startswith(name) for part in inside))
    return replace(shape, predicts=True, carried=rest)
