"""slime's training data (a dict of lists, one entry a sample) to `TrainSample`: what --custom-convert-samples-to-train-data-path gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.errors import HookError
from vime.packing.routing import joined
from vime.types import TrainSample
from vime.utils.types import Sample

__all__ = ["from_train_data"]

FLAG = "--custom-convert-samples-to-train-data-path"
NEEDED = ("tokens", "response_lengths", "rewards")
OPTIONAL = (
    "raw_reward", "truncated", "sample_indices", "group_indices", "rollout_ids", "loss_masks", "rollout_mask_sums", "rollout_log_probs",
    "teacher_log_probs", "weight_versions", "rollout_top_p_token_ids", "rollout_top_p_token_offsets",
    "rollout_routed_experts", "metadata",
)  # fmt: skip


def from_train_data(data: Any, samples: Sequence[Sample]) -> list[TrainSample]:
    """One TrainSample per entry.

    `data` has the lists `tokens` [T each], `response_lengths` and `rewards` (what advantages start from; no group normalisation
    follows); more of slime's are optional: loss_masks (default ones), raw_reward (default rewards), sample_indices (default
    0, 1, ...), rollout_ids (default sample_indices), group_indices (default those of `samples` by sample_indices), and the
    per-token ones. `samples` are what the function was given.

    Raises HookError naming the entry that is missing, unknown, or of another length.
    """
    if not isinstance(data, Mapping):
        raise _fault(f"it returned a {type(data).__name__}; right: a dict of lists with {', '.join(NEEDED)}")
    missing = [name for name in NEEDED if name not in data]
    unknown = [str(name) for name in data if name not in (*NEEDED, *OPTIONAL)]
    if missing or unknown:
        said = [
            f"{kind} {', '.join(names)}" for kind, names in (("without", missing), ("with entries that nothing reads:", unknown)) if names
        ]
        raise _fault(f"it returned a dict {' and '.join(said)}; needed are {', '.join(NEEDED)}, optional {', '.join(OPTIONAL)}")
    count = len(data["tokens"])
    for name, values in data.items():
        if values is not None and len(values) != count:
            raise _fault(f"'{name}' has {len(values)} entries, 'tokens' has {count}")
    columns: dict[str, Any] = {name: data.get(name) for name in (*NEEDED, *OPTIONAL)}
    indices = [int(v) for v in columns["sample_indices"] or range(count)]
    rollouts = [int(v) for v in columns["rollout_ids"] or indices]
    group_of = {sample.index: sample.group_index for sample in samples}
    groups = [int(v) for v in columns["group_indices"] or [_or(group_of.get(i), r) for i, r in zip(indices, rollouts, strict=True)]]
    masks = [_mask(columns, i) for i in range(count)]
    sums: dict[int, float] = defaultdict(float)
    for rollout, mask in zip(rollouts, masks, strict=True):
        sums[rollout] += float(mask.sum())
    return [
        TrainSample(
            tokens=_tokens(columns, i),
            response_length=int(columns["response_lengths"][i]),
            loss_mask=masks[i],
            reward=_number(columns, "rewards", i),
            raw_reward=_number(columns, "raw_reward" if columns["raw_reward"] is not None else "rewards", i),
            sample_id=indices[i],
            group_id=groups[i],
            rollout_id=rollouts[i],
            rollout_mask_sum=_number(columns, "rollout_mask_sums", i) if columns["rollout_mask_sums"] is not None else sums[rollouts[i]],
            rollout_log_probs=_per_token(columns, "rollout_log_probs", i),
            teacher_log_probs=_per_token(columns, "teacher_log_probs", i),
            kept_ids=_array(columns, "rollout_top_p_token_ids", i, np.int32),
            kept_offsets=_array(columns, "rollout_top_p_token_offsets", i, np.int64),
            weight_versions=_per_token(columns, "weight_versions", i),
            routed_experts=_routed(columns, i),
            truncated=bool(columns["truncated"][i]) if columns["truncated"] is not None else False,
            metadata=columns["metadata"][i] if columns["metadata"] is not None else None,
        )
        for i in range(count)
    ]


def _fault(text: str) -> HookError:
    return HookError(f"{FLAG}: {text}.")


def _or(value: int | None, other: int) -> int:
    return other if value is None else value


def _tokens(columns: Mapping[str, Any], i: int) -> npt.NDArray[np.int64]:
    tokens = np.asarray(columns["tokens"][i], dtype=np.int64)
    response = int(columns["response_lengths"][i])
    if tokens.ndim != 1 or not 0 <= response < len(tokens):
        raise _fault(
            f"entry {i} has {tokens.size} tokens and the response length {response}; a prompt token comes first, then the response"
        )
    return tokens


def _mask(columns: Mapping[str, Any], i: int) -> npt.NDArray[np.float32]:
    if columns["loss_masks"] is None:
        return np.ones(int(columns["response_lengths"][i]), dtype=np.float32)
    mask = _per_token(columns, "loss_masks", i)
    assert mask is not None
    if not np.isin(mask, (0, 1)).all():
        raise _fault(f"loss_masks[{i}] may hold only 0 and 1")
    return mask


def _per_token(columns: Mapping[str, Any], name: str, i: int) -> npt.NDArray[np.float32] | None:
    values = _array(columns, name, i, np.float32)
    if values is not None and (values.shape != (int(columns["response_lengths"][i]),) or not np.isfinite(values).all()):
        raise _fault(f"{name}[{i}] must be {columns['response_lengths'][i]} finite numbers, one a response token; it has {values.size}")
    return values


def _array(columns: Mapping[str, Any], name: str, i: int, dtype: Any) -> npt.NDArray[Any] | None:
    return None if columns[name] is None else np.asarray(columns[name][i], dtype=dtype)


def _routed(columns: Mapping[str, Any], i: int) -> npt.NDArray[np.int16] | None:
    """From Sample.rollout_routed_experts."""
    return joined(columns["rollout_routed_experts"][i]) if columns["rollout_routed_experts"] is not None else None


def _number(columns: Mapping[str, Any], name: str, i: int) -> float:
    value = float(columns[name][i])
    if not np.isfinite(value):
        raise _fault(f"{name}[{i}] is {value}, not a finite number")
    return value
