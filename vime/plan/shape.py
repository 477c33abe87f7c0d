"""The shape of a model, read from its config.json, and its parameters counted exactly."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.config.model_file import malformed
from vime.errors import CheckpointError

__all__ = ["KNOWN", "Delta", "Latent", "LayerSize", "MoE", "ModelSize", "model_size", "read_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (arXiv:2405.04434, section 2.1): keys and values are kept as one compressed vector a token."""

    q_rank: int | None  # None: queries are not compressed
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Gated delta net (arXiv:2412.06464), which stands in attention's place in some layers and keeps a state instead of a cache."""

    keys: int  # heads
    values: int
    key_dim: int
    value_dim: int
    kernel: int  # of the convolution over queries, keys and values
    layers: frozenset[int]  # which layers have it

    @property
    def mixed(self) -> int:
        """Numbers of queries, keys and values together, a token."""
        return 2 * self.keys * self.key_dim + self.values * self.value_dim

    @property
    def state(self) -> int:
        """Numbers that a layer keeps a sequence: one matrix a head of values, and the convolution's last inputs."""
        return self.values * self.key_dim * self.value_dim + self.mixed * (self.kernel - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """The mixture of experts that stands in the MLP's place in some layers."""

    experts: int
    chosen: int  # experts a token goes to
    ffn: int  # of one expert
    shared_ffn: int  # of the experts that every token goes to, together; 0 = none
    shared_gate: bool  # the shared ones are weighed by a gate
    layers: frozenset[int]  # which layers have it


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSize:
    """Parameters of one layer by how parallelism treats them."""

    split: int  # divided by tensor parallelism
    whole: int  # the same on all tensor-parallel ranks: norms, router, compressions
    expert: int  # divided by expert parallelism and expert-tensor parallelism


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A decoder. Sizes are of the whole model."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    groups: int  # key/value heads
    head_dim: int
    ffn: int
    vocab: int
    tied: bool  # the output layer is the embedding
    qk_norm: bool
    qkv_bias: bool
    gated: bool  # attention's output is multiplied by a gate
    max_positions: int
    latent: Latent | None = None
    delta: Delta | None = None
    moe: MoE | None = None

    @property
    def query_width(self) -> int:
        """Of all heads' queries together, a token."""
        if self.latent is not None:
            return self.heads * (self.latent.nope_dim + self.latent.rope_dim)
        return self.heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Of the attention's output, a token."""
        return self.heads * (self.latent.v_dim if self.latent is not None else self.head_dim)

    @property
    def cached_layers(self) -> int:
        """Layers whose keys and values an engine keeps."""
        return self.layers - (len(self.delta.layers) if self.delta is not None else 0)

    @property
    def cache_width(self) -> int:
        """Numbers that an engine keeps a token and such layer: keys and values of all groups, or the compressed vector."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_dim
        return 2 * self.groups * self.head_dim

    def has_experts(self, layer: int) -> bool:
        """Whether `layer` is a mixture of experts."""
        return self.moe is not None and layer in self.moe.layers

    def layer(self, number: int) -> LayerSize:
        """Parameters of one layer."""
        split, whole = self._delta() if self.delta is not None and number in self.delta.layers else self._attention()
        whole += 2 * self.hidden
        if not self.has_experts(number):
            return LayerSize(split=split + 3 * self.hidden * self.ffn, whole=whole, expert=0)
        assert self.moe is not None
        split += 3 * self.hidden * self.moe.shared_ffn
        whole += self.hidden * (self.moe.experts + int(self.moe.shared_gate))
        return LayerSize(split=split, whole=whole, expert=self.moe.experts * 3 * self.hidden * self.moe.ffn)

    def _delta(self) -> tuple[int, int]:
        """The same as `_attention` for a gated delta net."""
        d = self.delta
        assert d is not None
        value = d.values * d.value_dim
        project = self.hidden * (d.mixed + value + 2 * d.values) + value * self.hidden
        return project + d.mixed * d.kernel + 2 * d.values, d.value_dim

    def _attention(self) -> tuple[int, int]:
        """(divided by tensor parallelism, whole on each rank)."""
        if self.latent is None:
            q, kv = self.query_width, self.groups * self.head_dim
            split = self.hidden * (q + 2 * kv) + q * self.hidden * (2 if self.gated else 1) + (q + 2 * kv if self.qkv_bias else 0)
            return split, 2 * self.head_dim if self.qk_norm else 0
        a = self.latent
        split = a.kv_rank * self.heads * (a.nope_dim + a.v_dim) + self.value_width * self.hidden
        whole = self.hidden * (a.kv_rank + a.rope_dim) + a.kv_rank
        if a.q_rank is None:
            return split + self.hidden * self.query_width, whole
        return split + a.q_rank * self.query_width, whole + self.hidden * a.q_rank + a.q_rank

    @property
    def parameters(self) -> int:
        """Of the whole model, without vocabulary padding."""
        return _inside(self) + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with, embeddings included: what an expert model costs a token."""
        if self.moe is None:
            return self.parameters
        idle = self.moe.experts - self.moe.chosen
        return self.parameters - len(self.moe.layers) * idle * 3 * self.hidden * self.moe.ffn


@functools.lru_cache(maxsize=64)  # the search for settings that fit asks very often
def _inside(model: ModelSize) -> int:
    """Parameters of all layers."""
    layers = [model.layer(i) for i in range(model.layers)]
    return sum(x.split + x.whole + x.expert for x in layers)


def read_model(folder: str | Path) -> ModelSize:
    """The shape of the model in a Hugging Face folder; only its config.json is read. CheckpointError says what is missing."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing. A plan needs a model folder with at least config.json; weights are not looked at."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}). Copy or download it again.") from None
    if problem := malformed(config):
        raise CheckpointError(f"{path}: {problem}. Copy or download it again.")
    return model_size(config, str(path))


def model_size(config: Mapping[str, Any], path: str = "config.json") -> ModelSize:
    """The same from the parsed config.json; `path` is for messages."""
    names = config.get("architectures") or ["(none named)"]
    if names[0] not in KNOWN:
        raise CheckpointError(f"{path}: the size of {names[0]} is not known to the plan. Known are {', '.join(sorted(KNOWN))}.")
    try:
        whole = {**config, **(config.get("text_config") or {})}  # of a model that also sees images, the part that reads and writes
        whole = {key: value for key, value in whole.items() if value is not None}
        return _size(whole, names[0], tied=bool(config.get("tie_word_embeddings", whole.get("tie_word_embeddings", False))))
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}, which {names[0]} needs. Copy or download it again.") from None


KNOWN: Mapping[str, Mapping[str, bool]] = {  # what the config does not say
    "LlamaForCausalLM": {"qk_norm": False, "qkv_bias": False},
    "Qwen2ForCausalLM": {"qk_norm": False, "qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True, "qkv_bias": False},
    "Qwen3MoeForCausalLM": {"qk_norm": True, "qkv_bias": False},
    "Qwen3NextForCausalLM": {"qk_norm": True, "qkv_bias": False},
    "Qwen3_5ForCausalLM": {"qk_norm": True, "qkv_bias": False},
    "Qwen3_5MoeForCausalLM": {"qk_norm": True, "qkv_bias": False},
    "Qwen3_5ForConditionalGeneration": {"qk_norm": True, "qkv_bias": False},
    "Qwen3_5MoeForConditionalGeneration": {"qk_norm": True, "qkv_bias": False},
    "DeepseekV3ForCausalLM": {"qk_norm": False, "qkv_bias": False},
}


def _size(config: Mapping[str, Any], name: str, *, tied: bool) -> ModelSize:
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    latent = None
    if name.startswith("Deepseek"):
        latent = Latent(
            q_rank=config.get("q_lora_rank"),
            kv_rank=int(config["kv_lora_rank"]),
            nope_dim=int(config["qk_nope_head_dim"]),
            rope_dim=int(config["qk_rope_head_dim"]),
            v_dim=int(config["v_head_dim"]),
        )
    return ModelSize(
        architecture=name,
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        groups=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        ffn=int(config.get("intermediate_size") or 0) if config.get("num_experts") else int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        tied=tied,
        gated=name.startswith(("Qwen3Next", "Qwen3_5")),
        max_positions=int(config.get("max_position_embeddings") or 2048),
        latent=latent,
        delta=_delta(config, name),
        moe=_moe(config, name),
        **KNOWN[name],
    )


def _delta(config: Mapping[str, Any], name: str) -> Delta | None:
    if not name.startswith(("Qwen3Next", "Qwen3_5")):
        return None
    count = int(config["num_hidden_layers"])
    every = int(config.get("full_attention_interval") or 4)
    kinds = config.get("layer_types") or ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)]
    return Delta(
        keys=int(config["linear_num_key_heads"]),
        values=int(config["linear_num_value_heads"]),
        key_dim=int(config["linear_key_head_dim"]),
        value_dim=int(config["linear_value_head_dim"]),
        kernel=int(config["linear_conv_kernel_dim"]),
        layers=frozenset(i for i, kind in enumerate(kinds) if kind == "linear_attention"),
    )


def _moe(config: Mapping[str, Any], name: str) -> MoE | None:
    layers = range(int(config["num_hidden_layers"]))
    if name.startswith(("Qwen3Moe", "Qwen3Next", "Qwen3_5Moe")):
        step, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
        return MoE(
            experts=int(config.get("num_experts") or config["num_local_experts"]),  # transformers 5 writes the second
            chosen=int(config["num_experts_per_tok"]),
            ffn=int(config["moe_intermediate_size"]),
            shared_ffn=int(config.get("shared_expert_intermediate_size") or 0),
            shared_gate=bool(config.get("shared_expert_intermediate_size")),
            layers=frozenset(i for i in layers if (i + 1) % step == 0 and i not in dense),
        )
    if name == "DeepseekV3ForCausalLM":
        ffn = int(config["moe_intermediate_size"])
        return MoE(
            experts=int(config["n_routed_experts"]),
            chosen=int(config["num_experts_per_tok"]),
            ffn=ffn,
            shared_ffn=ffn * int(config.get("n_shared_experts") or 0),
            shared_gate=False,
            layers=frozenset(i for i in layers if i >= int(config.get("first_k_dense_replace") or 0)),
        )
    return None
