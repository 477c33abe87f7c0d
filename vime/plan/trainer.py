"""Memory of one trainer rank: what it always holds, and what a micro-batch adds."""

from __future__ import annotations

from dataclasses import dataclass

from vime.plan.adapters import adapter_numbers, adapter_weights
from vime.plan.batches import batches, computed_tokens, micro_batch_tokens
from vime.plan.footprint import Item
from vime.plan.settings import Settings
from vime.plan.shape import Delta, ModelSize

__all__ = [
    "StageWeights",
    "activation_numbers",
    "held",
    "role_weights",
    "stage_weights",
    "sync_bucket",
    "sync_items",
    "train_items",
    "trained_weights",
]

ROLE, CRITIC = "trainer", "critic"
ADAM_BYTES = 8  # two float32 moments a weight
MAIN_BYTES = 4  # the float32 master copy of a bfloat16 weight
CHUNK_NUMBERS, CHUNK_NUMBERS_CPU = 2**26, 2**18  # of a float32 piece of the logits (backends/megatron_utils/log_probs.py)
ADAM_PIECE = 2**24  # weights updated at once (backends/megatron_utils/adam.py)
CHUNKS_AT_ONCE = 3  # scaled logits, probabilities, gradient
DELTA_CHUNK = 64  # tokens after which a gated delta net's state is kept
SHORT = 64  # tokens up to which the CPU's attention keeps its weights (backends/megatron_utils/attention.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWeights:
    """Parameters that one rank of a pipeline stage holds."""

    dense: int
    expert: int

    @property
    def all(self) -> int:
        """Both."""
        return self.dense + self.expert


def stage_layers(s: Settings, stage: int) -> list[int]:
    """The numbers of a stage's layers: with chunks, every so-many-th group of layers is its."""
    out: list[int] = []
    begin = 0
    for _ in range(s.virtual):
        for number, count in enumerate(s.stage_counts):
            if number == stage:
                out += range(begin, begin + count // s.virtual)
            begin += count // s.virtual
    return out


def stage_weights(s: Settings, stage: int, role: str = ROLE) -> StageWeights:
    """Parameters of one rank of `stage`. A tied embedding stands on the first and on the last stage; a critic has no output layer."""
    model = s.model
    first, last = stage == 0, stage == s.pipeline - 1
    layers = [model.layer(i) for i in stage_layers(s, stage)]
    table = s.padded_vocab * model.hidden // s.tensor
    tables = int(first) + int(last and not (first and model.tied) and role != CRITIC)
    dense = sum(x.split // s.tensor + x.whole for x in layers) + tables * table + (model.hidden if last else 0)
    return StageWeights(dense=dense, expert=sum(x.expert for x in layers) // (s.expert * s.expert_tensor))


def trained_weights(s: Settings, stage: int, role: str = ROLE) -> StageWeights:
    """Those of them that are trained: all, or the policy's adapters."""
    if not s.lora_rank or role == CRITIC:
        return stage_weights(s, stage, role)
    dense, expert = adapter_weights(s, stage_layers(s, stage))
    return StageWeights(dense=dense, expert=expert)


def held(s: Settings, stage: int) -> list[Item]:
    """Weights, gradients and optimizer state of one rank, and of the critic's beside it; on a CPU also the weights of other roles.

    Mixed precision with Adam: 2 bytes a weight, 2 or 4 its gradient, 4 + 8 its master copy and moments, these divided over the
    ranks that hold the same weights (ZeRO stage 1, arXiv:1910.02054, section 5.1). In float32 the weight is its own master copy.
    """
    items = _held(s, stage, ROLE)
    if s.critic:
        items += _held(s, stage, CRITIC)
    if s.cpu and s.roles:
        items.append(role_weights(s, stage))
    return items


def _held(s: Settings, stage: int, role: str) -> list[Item]:
    w, all_weights = trained_weights(s, stage, role), stage_weights(s, stage, role).all
    if s.lora_rank and role != CRITIC:
        all_weights += w.all
    per_weight = (0 if s.stateless_adam else ADAM_BYTES) + (MAIN_BYTES if s.param_bytes < 4 else 0)
    return [
        _item("weights", all_weights * s.param_bytes, role),
        _item("gradients", w.all * s.grad_bytes, role),
        _item("optimizer", per_weight * _own_share(s, w), role),
    ]


def _own_share(s: Settings, w: StageWeights) -> int:
    """Weights that a rank's optimizer updates."""
    shares = (s.data * s.context, s.expert_data) if s.distributed_optimizer else (1, 1)
    return -(-w.dense // shares[0]) + -(-w.expert // max(1, shares[1]))


def role_weights(s: Settings, stage: int) -> Item:
    """Reference, teacher, old policies: each a copy of a rank's weights in host memory, which changes places with them while it is used."""
    return _item("weights of other roles", s.roles * stage_weights(s, stage).all * s.param_bytes)


def activation_numbers(s: Settings, layer: int) -> float:
    """Numbers that a layer keeps for its backward pass, a token and rank.

    After Korthikanti et al. (arXiv:2205.05198, section 4.1, eq. 1 to 4), whose layer has LayerNorm, GELU, dropout and as many key
    as query heads. Here: the inputs and outputs of two norms (4 h, divided over tensor-parallel ranks with sequence parallelism
    only); queries and keys before their norms; queries, keys, values and output of attention that keeps no scores (FlashAttention,
    arXiv:2205.14135, algorithm 1); SwiGLU's two inputs and its output (3 f). No dropout. All but the norms is divided by tensor
    parallelism.
    """
    model, modules = s.model, s.recompute_modules if s.recompute == "selective" else ()
    whole = (2.0 if "layernorm" in modules else 4.0) * model.hidden
    split = _delta_numbers(model.delta) if model.delta is not None and layer in model.delta.layers else _attention_numbers(s, modules)
    if not model.has_experts(layer):
        split += 0 if "mlp" in modules else 3 * model.ffn
        return (whole / (s.tensor if s.sequence else 1)) + split / s.tensor
    moe = model.moe
    assert moe is not None
    split += 0 if "shared_experts" in modules or "moe" in modules else 3 * moe.shared_ffn
    routed = 0.0
    if "moe" not in modules:  # each chosen expert's input and output, and its SwiGLU; float32 router scores
        routed = moe.chosen * (2 * model.hidden + (2 if "moe_act" in modules else 3) * moe.ffn) + 4 * moe.experts / s.param_bytes * 2
    return (whole / (s.tensor if s.sequence else 1)) + (split + routed) / s.tensor


def _attention_numbers(s: Settings, modules: tuple[str, ...]) -> float:
    """Of all heads together."""
    model, a = s.model, s.model.latent
    out = model.value_width + 4 * model.heads / s.param_bytes  # and one float32 a head
    if s.cpu and "core_attn" not in modules:
        out += model.heads * s.longest if s.longest <= SHORT else model.value_width
    if a is None:
        kv = model.groups * model.head_dim
        normed = model.query_width + kv if model.qk_norm else 0
        gate = 2 * model.value_width if model.gated else 0  # its projection, and the output before it
        return out + gate + normed + model.query_width + 2 * kv * s.context  # keys and values of all context-parallel ranks
    compressed = 2 * ((a.q_rank or 0) + a.kv_rank + a.rope_dim) * s.tensor  # on each rank whole
    raised = 0 if "mla_up_proj" in modules else 2 * model.query_width + model.value_width + model.heads * (a.nope_dim + a.v_dim)
    return out + compressed + raised


def _delta_numbers(d: Delta) -> float:
    """Of a gated delta net computed in chunks (arXiv:2412.06464, section 3.3): the projections, what the convolution takes and gives,
    keys and queries for each head of values, the output before and after its gated norm, and one state a chunk.
    """
    value = d.values * d.value_dim
    repeated = 2 * d.values * d.key_dim
    return (d.mixed + value + 4 * d.values) + 2 * d.mixed + repeated + 3 * value + d.values * d.key_dim * d.value_dim / DELTA_CHUNK


def _kept(s: Settings, stage: int) -> tuple[float, float]:
    """(numbers a token kept for one micro-batch by a stage, numbers that exist a second time while they are recomputed)."""
    numbers = [activation_numbers(s, layer) + (adapter_numbers(s, layer) if s.lora_rank else 0.0) for layer in stage_layers(s, stage)]
    if s.recompute != "full":
        return sum(numbers), 0.0
    entry = s.model.hidden / (s.tensor if s.sequence else 1)  # the input of a recomputed unit (arXiv:2205.05198, section 5)
    if s.recompute_method == "block":
        count = min(s.recompute_layers * s.virtual, len(numbers))
        return count * entry + sum(numbers[count:]), max(numbers)
    unit = min(s.recompute_layers, len(numbers))
    return -(-len(numbers) // unit) * entry, unit * max(numbers)


def in_flight(s: Settings, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once.

    One forward, one backward: p - stage of them. With v chunks a rank, 2 (p - stage - 1) + (v - 1) p + 1 chunks
    (arXiv:2104.04473, section 2.2; on the first stage that is eq. 5's 1 + (p - 1) / (p v) of arXiv:2205.05198, times p).
    """
    count = batches(s).most_micro_batches
    if s.virtual == 1:
        return min(s.pipeline - stage, count)
    chunks = 2 * (s.pipeline - stage - 1) + (s.virtual - 1) * s.pipeline + 1
    return min(chunks, count * s.virtual) / s.virtual


def train_items(s: Settings, stage: int) -> list[Item]:
    """What training adds to `held` at its peak. A critic takes turns with the policy; on a CPU what it has freed stays with it."""
    items = _train_items(s, stage, ROLE)
    return items + _train_items(s, stage, CRITIC) if s.critic and s.cpu else items


def _train_items(s: Settings, stage: int, role: str) -> list[Item]:
    """Activations of the micro-batches in flight, logits, workspaces."""
    tokens = computed_tokens(s)
    kept, again = _kept(s, stage)
    size = s.param_bytes
    items = [_item("activations", int(tokens * size * kept * in_flight(s, stage)), role)]
    if s.stateless_adam:
        items.append(_item("moments of this step", ADAM_BYTES * _own_share(s, trained_weights(s, stage, role)), role))
    if again:
        items.append(_item("recomputed layer", int(tokens * size * again), role))
    last = stage == s.pipeline - 1
    if last and role != CRITIC:
        items += logits_items(s, micro_batch_tokens(s))
    table = _table(s) if (last or stage == 0) and not (s.lora_rank and role != CRITIC) else 0
    items.append(_item("backward workspace", int(tokens * size * _workspace(s)) + table, role))
    if not s.cpu:
        update = _item("optimizer workspace", _update(s, stage, role))
        return items if sum(i.num_bytes for i in items) >= update.num_bytes else [update]
    # gloo's reductions and gathers work on a copy of the whole buffer; and glibc gives freed blocks below 32 MiB, as most activations
    # are, not back to the system: what comes after the backward pass comes on top of them
    copy = max(_update(s, stage, role), trained_weights(s, stage, role).all * s.grad_bytes)
    return [*items, _item("copy in a collective", copy, role)]


def _update(s: Settings, stage: int, role: str) -> int:
    """What Adam's step needs besides: one float32 number for each weight of a piece, the largest parameter at least."""
    w = trained_weights(s, stage, role)
    mine = max(w.dense // (s.data * s.context), w.expert // max(1, s.expert_data))
    largest = max(s.padded_vocab // s.tensor, 3 * s.model.ffn // s.tensor) * s.model.hidden
    return MAIN_BYTES * min(mine, ADAM_PIECE + largest)


def logits_items(s: Settings, tokens: int) -> list[Item]:
    """Logits of the rows that are scored, their gradient, and the float32 pieces in which log-probs are computed."""
    share = 1.0 if s.whole_logits else max(s.longest_response / s.longest, s.mean_response / (s.mean_prompt + s.mean_response))
    rows = int(tokens * s.context * min(1.0, share)) // s.context
    width = s.padded_vocab // s.tensor
    chunk = s.log_probs_chunk if s.log_probs_chunk > 0 else max(1, (CHUNK_NUMBERS_CPU if s.cpu else CHUNK_NUMBERS) // width)
    return [
        _item("logits and their gradient", 2 * rows * width * s.param_bytes),
        _item("log-prob chunks", CHUNKS_AT_ONCE * min(rows, chunk) * width * 4),
    ]


def sync_items(s: Settings, stage: int) -> list[Item]:
    """What a weight sync adds on the rank that sends: one bucket of whole tensors; with adapters the one that is merged, in float32."""
    if stage:
        return []
    widest = max(3 * s.model.ffn // s.tensor, s.model.query_width) * s.model.hidden
    merged = [_item("merged tensor", widest * (4 if s.param_bytes == 4 else 8))] if s.lora_rank else []
    return [_item("sync bucket", sync_bucket(s)), *merged]


def sync_bucket(s: Settings) -> int:
    """Bytes of the largest bucket: the last tensor may go beyond the limit."""
    largest = max(s.model.vocab * s.model.hidden, s.model.hidden * s.model.ffn)
    return min(s.bucket_bytes + largest * s.param_bytes, s.model.parameters * s.param_bytes)


def _workspace(s: Settings) -> float:
    """Numbers a token that the backward pass of one layer holds besides: the gradients of its widest tensors."""
    model: ModelSize = s.model
    wide = 3 * model.ffn / s.tensor
    if model.moe is not None:
        wide = max(wide, model.moe.chosen * (3 * model.moe.ffn + model.hidden) / s.tensor)
    return wide + 2 * model.hidden


def _table(s: Settings) -> int:
    """The embedding's gradient before it is added to the gradient buffer."""
    return s.padded_vocab * s.model.hidden // s.tensor * s.param_bytes


def _item(name: str, num_bytes: int, role: str = ROLE) -> Item:
    return Item(role=role, name=name, num_bytes=num_bytes)
