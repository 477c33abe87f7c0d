"""The arithmetic of batches: groups, samples, optimizer steps, micro-batches, and how data-parallel ranks share them."""

from __future__ import annotations

from dataclasses import dataclass

from vime.plan.settings import Settings

__all__ = ["Batches", "batches", "computed_tokens", "micro_batch_tokens"]

PACKED = 0.97  # share of the token budget that packing fills: what this project's packing is held to
OBJECT_BYTES = 24  # of one token on its way to the trainer: ids i64, mask, weight and two log-probs f32


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """One rollout step and what training makes of it. Tokens at the mean and at the longest length."""

    groups: int
    samples: int
    steps: int
    samples_per_step: int
    samples_per_rank: tuple[int, int]  # of one step: (fewest, most)
    tokens: int  # of a rollout step, at mean lengths
    most_tokens: int
    micro_batches: int  # of one rank in one step, at mean lengths
    most_micro_batches: int
    imbalance: float  # share by which the fullest rank has more than the mean, were all samples of one length
    idle_ranks: int  # data-parallel ranks without a sample in a step
    bubble: float  # share of a step in which a pipeline rank waits
    object_bytes: int  # of one rollout step in Ray's object store, at the longest length
    total_steps: int | None  # optimizer steps of the whole run


def micro_batch_tokens(s: Settings) -> int:
    """Most tokens of one micro-batch on one rank: the longest sample has a micro-batch of its own if it is above the budget."""
    samples = -(-s.prompts * s.samples // s.steps // s.data)
    whole = samples * s.longest
    whole = min(whole, s.micro_batch * s.longest) if s.max_tokens is None else max(s.longest, min(s.max_tokens, whole))
    return -(-whole // s.context)


def computed_tokens(s: Settings) -> int:
    """Of these, the tokens that are really computed: on a CPU a group's prompt once (vime/packing/computed.py)."""
    tokens = micro_batch_tokens(s)
    if not s.cpu or s.samples == 1 or s.sequence or s.context > 1 or s.model.moe is not None or s.whole_logits:
        return tokens
    prompt = s.longest - s.longest_response
    longest = (prompt / s.samples + s.longest_response) / s.longest
    mean = (s.mean_prompt / s.samples + s.mean_response) / (s.mean_prompt + s.mean_response)
    return int(tokens * max(longest, mean))


def batches(s: Settings) -> Batches:
    """How one rollout step is trained on."""
    samples = s.prompts * s.samples
    per_step = samples // s.steps
    mean = s.mean_prompt + s.mean_response
    micro = _micro_batches(s, per_step, mean, PACKED)
    return Batches(
        groups=s.prompts,
        samples=samples,
        steps=s.steps,
        samples_per_step=per_step,
        samples_per_rank=(per_step // s.data, -(-per_step // s.data)),
        tokens=samples * mean,
        most_tokens=samples * s.longest,
        micro_batches=micro,
        most_micro_batches=_micro_batches(s, per_step, s.longest),
        imbalance=-(-per_step // s.data) * s.data / per_step - 1.0,
        idle_ranks=max(0, s.data - per_step),
        bubble=(s.pipeline - 1) / (s.virtual * micro + s.pipeline - 1),
        object_bytes=samples * s.longest * OBJECT_BYTES,
        total_steps=None if s.num_rollout is None else s.num_rollout * s.steps,
    )


def _micro_batches(s: Settings, samples: int, length: int, packed: float = 1.0) -> int:
    """Of one data-parallel rank in one optimizer step, when packing fills the share `packed` of the budget."""
    mine = -(-samples // s.data)
    each = s.micro_batch if s.max_tokens is None else max(1, int(s.max_tokens * packed) // length)
    return max(1, -(-mine // each))
