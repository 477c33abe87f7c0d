"""`Sample`: one prompt with its response. The type that generate functions, rewards and filters work on."""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["Sample"]


@dataclass
class Sample:
    """One prompt and one response to it. T = len(tokens), R = response_length.

    Example: a prompt of 3 tokens and a response of 2 ("7", end of text), both generated at weight version 4:
    tokens=[5, 9, 2, 17, 1], response_length=2, loss_mask=None (all ones), rollout_log_probs=[-0.1, -0.02],
    weight_versions=["4", "4"], status=COMPLETED.
    """

    class Status(enum.Enum):
        """Where a sample stands."""

        PENDING = "pending"  # nothing generated yet
        COMPLETED = "completed"  # the model stopped by itself
        TRUNCATED = "truncated"  # the length limit was reached
        ABORTED = "aborted"  # cut off by us; may be continued
        FAILED = "failed"  # could not be had; left out of the group's statistics

    group_index: int | None = None  # the prompt's group: all its members are compared with one another
    index: int | None = None  # unique over the whole run
    rollout_id: int | None = None  # the execution; siblings of one fan-out share it (None: the sample's own index)
    prompt: str | list[dict[str, Any]] = ""  # rendered text, or chat messages
    tokens: list[int] = field(default_factory=list)  # [T] prompt and response ids
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0  # R
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None  # [R] 1 = trained; None = all ones
    weight_versions: list[str] = field(default_factory=list)  # [R] the weight version each response token was sampled under
    rollout_log_probs: list[float] | None = None  # [R] the engine's log-probabilities, natural logarithm
    teacher_log_probs: list[float] | None = None  # [R]
    rollout_top_p_token_ids: list[int] | None = None  # [K] the tokens that top-k and top-p sampling left, token by token
    rollout_top_p_token_offsets: list[int] | None = None  # [R + 1] response token i was drawn from ids[offsets[i] : offsets[i + 1]]
    rollout_routed_experts: list[str] = field(default_factory=list)  # replies' text (vime.packing.routing), each going on from the last
    remove_sample: bool = False  # the mask becomes all zeros; the sample still counts in its group
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None  # overrides --custom-generate-function-path for this sample
    custom_rm_path: str | None = None  # overrides --custom-rm-path for this sample
    train_metadata: dict[str, Any] | None = None  # handed through to the trainer
    session_id: str | None = None  # requests of one session go to the same engine
    non_generation_time: float = 0.0  # seconds spent in tools and environments

    def to_dict(self) -> dict[str, Any]:
        """All fields by name; `status` as its value. The inverse of `from_dict`."""
        out = {name: copy.copy(value) for name, value in self.__dict__.items()}
        out["status"] = self.status.value
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """Build a sample from `to_dict`'s output; names that are no field become plain attributes."""
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in data.items() if k in known}
        if "status" in values:
            values["status"] = cls.Status(values["status"])
        sample = cls(**values)
        for name, value in data.items():
            if name not in known:
                setattr(sample, name, value)
        return sample

    def get_reward_value(self, args: Any) -> float:
        """The reward as a number: `reward`, or `reward[args.reward_key]` when it is a dict."""
        if isinstance(self.reward, dict):
            return float(self.reward[args.reward_key])
        return float(self.reward)  # type: ignore[arg-type]

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: list[int],
        log_probs: list[float] | None = None,
        trainable: bool = True,
        text: str | None = None,
        weight_versions: list[str] | None = None,
        kept: list[list[int]] | None = None,
        routed_experts: str | None = None,
        status: Status | None = None,
        meta_info: dict[str, Any] | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append response tokens and keep every per-token field as long as the response.

        Trainable tokens (sampled by the engine) need one log-probability each; others (tool output, template text)
        get mask 0, log-probability 0.0 and the weight version "". `kept` lists for each token what top-k and top-p sampling
        left to choose from; without it a token counts as drawn from the whole vocabulary. `routed_experts` is the engine's text for
        the tokens that no earlier one covered, up to the last but one.

        `meta_info` is slime's name for what else a reply says. Read are `weight_version`, of all these tokens, and
        `finish_reason["type"]` (stop, length, abort), the status unless `update_terminal_info` is False.
        """
        count = len(tokens)
        if meta_info is not None:
            weight_versions, status = self._told(meta_info, count if trainable else 0, weight_versions, status, update_terminal_info)
        if trainable and (log_probs is None or len(log_probs) != count):
            got = "none" if log_probs is None else str(len(log_probs))
            raise ValueError(
                f"append_response_tokens: {count} trainable tokens need {count} log_probs, got {got}. "
                "Pass the engine's log-probabilities, or trainable=False for text the model did not sample."
            )
        if weight_versions is not None and len(weight_versions) != count:
            raise ValueError(f"append_response_tokens: {count} tokens but {len(weight_versions)} weight_versions.")
        if kept is not None and len(kept) != count:
            raise ValueError(f"append_response_tokens: {count} tokens but {len(kept)} lists of kept tokens.")
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * self.response_length
        self.tokens = self.tokens + list(tokens)
        self.response_length += count
        self.loss_mask = self.loss_mask + [int(trainable)] * count
        self.rollout_log_probs = self.rollout_log_probs + (list(log_probs) if trainable and log_probs else [0.0] * count)
        missing = self.response_length - count - len(self.weight_versions)
        self.weight_versions = self.weight_versions + [""] * missing + list(weight_versions or [""] * count)
        if kept is not None or self.rollout_top_p_token_offsets is not None:
            self._append_kept(kept or [[]] * count)
        if routed_experts is not None:
            self.rollout_routed_experts = [*self.rollout_routed_experts, routed_experts]
        if text is not None:
            self.response += text
        if status is not None:
            self.status = status

    def _told(
        self, meta_info: dict[str, Any], count: int, weight_versions: list[str] | None, status: Status | None, terminal: bool
    ) -> tuple[list[str] | None, Status | None]:
        """What `meta_info` adds to these two; what is given beside it wins."""
        if weight_versions is None and count and meta_info.get("weight_version") is not None:
            weight_versions = [str(meta_info["weight_version"])] * count
        reason = (meta_info.get("finish_reason") or {}).get("type")
        if status is None and terminal and reason is not None:
            ends = {"stop": self.Status.COMPLETED, "length": self.Status.TRUNCATED, "abort": self.Status.ABORTED}
            if reason not in ends:
                raise ValueError(f"append_response_tokens: meta_info's finish_reason is {reason!r}; known are {', '.join(ends)}.")
            status = ends[reason]
        return weight_versions, status

    def _append_kept(self, kept: list[list[int]]) -> None:
        ids = list(self.rollout_top_p_token_ids or [])
        before = self.response_length - len(kept)
        offsets = list(self.rollout_top_p_token_offsets or [0] * (before + 1))
        for tokens in kept:
            ids += tokens
            offsets.append(len(ids))
        self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets = ids, offsets
