"""Mixtures of experts: the router with its load-balancing losses, their metrics, and routing that is recorded and replayed.

    --moe-router-load-balancing-type aux_loss, global_aux_loss     Megatron's (arXiv:2101.03961, eq. 4), times --moe-aux-loss-coeff
    --moe-z-loss-coeff                                             mean over tokens of logsumexp(logits)^2 (arXiv:2202.08906, eq. 5)

Each is a mean over the step's micro-batches and is added to the loss, at whatever layout; padding and fillers count in none of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from vime.backends.megatron_utils.convert.shape import ModelShape
from vime.config.sections import AlgorithmConfig
from vime.errors import ConfigError, TrainerError
from vime.packing.pack import PackedBatch

__all__ = ["Router", "RoutingTape", "routing_metrics", "routing_tape", "share_of_losses"]

METRICS = {"load_balancing_loss": "aux_loss", "global_load_balancing_loss": "global_aux_loss", "z_loss": None}


class RoutingTape:
    """Which experts the tokens of each micro-batch went to, layer by layer, for later passes to take again.

    The policy that is trained then uses the experts of the policy that generated, although it has moved (arXiv:2507.18071, section
    5.3). They are recorded in one pass, and stay on their rank: all passes over a step have one layout. Or they are `of_engine`, and
    come with the micro-batches (arXiv:2510.11370, section 3.1). `clear` when the step is done.
    """

    def __init__(self, *, of_engine: bool = False) -> None:
        self.recording = False
        self.replaying = False
        self.of_engine = of_engine
        self._packed: PackedBatch | None = None
        self._places: torch.Tensor | None = None
        self._chosen: dict[tuple[int, int], torch.Tensor] = {}

    def start(self, packed: PackedBatch, places: torch.Tensor | None = None) -> None:
        """The next pass through the layers is over `packed`, whose tokens are the key: they stay when values are added to it.

        `places` [t] i64 are those in the pack of the tokens that this rank's routers see, T standing for padding: for the engine's choice.
        """
        self._packed, self._places = packed, places

    @contextmanager
    def old_policy(self) -> Iterator[None]:
        """The passes inside are over the policy that generated: they record, or already take the engine's choice."""
        self.clear()
        self.recording, self.replaying = not self.of_engine, self.of_engine
        yield
        self.recording = self.replaying = False

    @contextmanager
    def training(self) -> Iterator[None]:
        """The passes inside take those choices; afterwards they are forgotten."""
        self.replaying = True
        yield
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        self._chosen.clear()
        self._packed = self._places = None
        self.recording = self.replaying = False

    def put(self, layer: int, chosen: torch.Tensor) -> None:
        """Keep a layer's choice, [tokens of this rank, k] i64."""
        assert self._packed is not None
        self._chosen[id(self._packed.tokens), layer] = chosen

    def get(self, layer: int) -> torch.Tensor | None:
        """A layer's choice, -1 where the engine told none; None for a filler, in which nothing is trained. Raises TrainerError when
        it was not recorded."""
        assert self._packed is not None
        if self.of_engine:
            return self._engines(layer)
        found = self._chosen.get((id(self._packed.tokens), layer))
        if found is None and len(self._packed.trained_rows):
            ids = list(self._packed.sample_ids[:4])
            raise TrainerError(
                f"no routing of layer {layer} was recorded for the micro-batch with samples {ids}...: it cannot be replayed."
            )
        return found

    def _engines(self, layer: int) -> torch.Tensor | None:
        assert self._packed is not None
        assert self._places is not None
        if self._packed.routed is None:
            return None
        if layer > self._packed.routed.shape[1]:
            raise TrainerError(f"the engine's routing is of {self._packed.routed.shape[1]} layers, and the model has a layer {layer}.")
        chosen = torch.nn.functional.pad(self._packed.routed[:, layer - 1].long(), (0, 0, 0, 1), value=-1)
        return chosen[self._places]


def routing_tape(algorithm: AlgorithmConfig, shape: ModelShape) -> RoutingTape | None:
    """What --use-routing-replay or --use-rollout-routing-replay asks for. Raises ConfigError for a model without experts."""
    if not (algorithm.use_routing_replay or algorithm.use_rollout_routing_replay):
        return None
    if shape.experts is None:
        flag = "--use-rollout-routing-replay" if algorithm.use_rollout_routing_replay else "--use-routing-replay"
        raise ConfigError(f"{flag} has no effect: {shape.path} is of a model without experts. Leave it out.")
    return RoutingTape(of_engine=algorithm.use_rollout_routing_replay)


class _LayerTape:
    """What Megatron asks for its top-k: this layer's part of the tape.

    Where activations are recomputed, a layer runs twice: first without gradients, then, in the backward pass and in the order of the
    micro-batches, with them. The second run takes what the first one took, whatever micro-batch has been started meanwhile.
    """

    def __init__(self, tape: RoutingTape, router: TopKRouter) -> None:
        self._tape, self._router = tape, router
        self._pending: deque[torch.Tensor | None] = deque()

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(values [T, k], indices [T, k]) of the experts to use."""
        if self._router.is_mtp_layer:  # it is counted by itself, and works in training alone: nobody has chosen for it
            return default_compute_topk(scores, topk, num_groups, group_topk)  # type: ignore[no-any-return]
        layer = self._router.layer_number
        chosen: torch.Tensor | None = None
        if self._tape.replaying:
            second = torch.is_grad_enabled() and len(self._pending) > 0
            chosen = self._pending.popleft() if second else self._tape.get(layer)
            if self._router.training and not torch.is_grad_enabled():
                self._pending.append(chosen)
        if chosen is not None and not self._tape.of_engine:
            return scores.gather(1, chosen), chosen
        values, indices = default_compute_topk(scores, topk, num_groups, group_topk)
        if chosen is not None:
            if chosen.shape != indices.shape:
                raise TrainerError(f"the engine chose {chosen.shape[1]} experts a token, and the trainer's routers choose {topk}.")
            chosen = torch.where(chosen < 0, indices, chosen)
            return scores.gather(1, chosen), chosen
        if self._tape.recording:
            self._tape.put(layer, indices.detach())
        return values, indices


class Router(TopKRouter):
    """Megatron's router with losses that are means over tokens and micro-batches at every layout."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.calculate_per_token_loss = False  # it would multiply by a number of tokens by which nothing is divided here
        tape = getattr(config, "routing_tape", None)
        if tape is not None:
            self.router_replay = _LayerTape(tape, self)

    def set_layer_number(self, layer_number: int) -> None:
        """Its place in the whole model, from 1."""
        self.layer_number = layer_number

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Megatron's own takes the mean of the ranks' means, which weighs tokens by how many others are on their rank."""
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self.training or not torch.is_grad_enabled():
            return logits
        values = torch.logsumexp(logits, dim=-1).square()
        if padding_mask is not None:
            values = values.masked_fill(padding_mask, 0.0)
        count = torch.tensor(float(len(values)) if padding_mask is None else float((~padding_mask).sum()), device=logits.device)
        dist.all_reduce(count, group=self.tp_cp_group)
        loss = values.sum() / count.clamp(min=1)
        get_moe_metrics_tracker().record("z_loss", loss, self.layer_number, self.config.num_layers)
        return MoEAuxLossAutoScaler.apply(logits, coefficient * loss)

    def _apply_aux_loss(
        self, probs: torch.Tensor, scores_for_aux_loss: torch.Tensor, routing_map: torch.Tensor, with_padding_mask: bool = False
    ) -> torch.Tensor:
        """Megatron's, and 0 for a micro-batch of padding alone."""
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        per_expert, total = self._counts(routing_map, self.tp_cp_group)
        loss = self._balance(scores_for_aux_loss, per_expert, total, coefficient)
        return self.attach_and_log_load_balancing_loss(probs, coefficient, loss, "load_balancing_loss", self.tp_cp_group)

    def _apply_global_aux_loss(
        self, probs: torch.Tensor, scores_for_aux_loss: torch.Tensor, routing_map: torch.Tensor, with_padding_mask: bool = False
    ) -> torch.Tensor:
        """Megatron's, and 0 for micro-batches of padding alone."""
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        if coefficient == 0:
            return probs
        per_expert, total = self._counts(routing_map, self.tp_dp_cp_group)
        self.global_tokens_per_expert += per_expert
        self.ga_steps += 1
        loss = self._balance(scores_for_aux_loss, self.global_tokens_per_expert / self.ga_steps, total, coefficient)
        return self.attach_and_log_load_balancing_loss(
            probs, coefficient, loss, "global_load_balancing_loss", self.tp_dp_cp_group, needs_dp_avg=False
        )

    def _counts(self, routing_map: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens of each expert [E], tokens, at least 1) over the ranks of `group`, padding left out."""
        per_expert, _, total = get_tokens_per_expert_and_token_count(
            routing_map=routing_map, reduce_group=group, topk=self.topk, with_padding_mask=True
        )
        return per_expert, total.clamp(min=1)

    def _balance(self, scores: torch.Tensor, per_expert: torch.Tensor, total: torch.Tensor, coefficient: float) -> torch.Tensor:
        return switch_load_balancing_loss_func(
            probs=scores,
            tokens_per_expert=per_expert,
            total_num_tokens=total,
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coefficient,
            fused=self.config.moe_router_fusion,
        )

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Megatron's own applies the mask [T] to the last dimension of the map [T, E], which fails."""
        super()._apply_expert_bias(routing_map if padding_mask is None else routing_map & ~padding_mask[:, None])


def share_of_losses(config: TransformerConfig, batches: Sequence[PackedBatch]) -> None:
    """Let the routers' losses count as means over the step's micro-batches of all data-parallel ranks, fillers left out. Collective."""
    count = torch.tensor([float(sum(not packed.is_filler for packed in batches))], device=batches[0].tokens.device)
    dist.all_reduce(count, group=parallel_state.get_data_parallel_group())
    share = 1.0 / count
    config.moe_grad_scale_func = lambda: share  # type: ignore[attr-defined]
    config.moe_micro_batches = float(count)  # type: ignore[attr-defined]  # for `routing_metrics`


def routing_metrics(config: TransformerConfig, num_micro_batches: int) -> dict[str, float]:
    """The step's router losses, without their coefficients, as means over layers and micro-batches; empty where there are none.

    Collective over all ranks.
    """
    if config.num_moe_experts is None:
        return {}
    kinds = config.moe_router_load_balancing_type
    kinds = kinds if isinstance(kinds, list) else [kinds]
    coefficients = config.moe_aux_loss_coeff if isinstance(config.moe_aux_loss_coeff, list) else [config.moe_aux_loss_coeff] * len(kinds)
    used = {kind for kind, coefficient in zip(kinds, coefficients, strict=False) if coefficient > 0}
    names = [name for name, kind in METRICS.items() if (kind in used if kind else config.moe_z_loss_coeff)]
    layers = config.num_layers if isinstance(config.moe_layer_freq, int) else sum(config.moe_layer_freq)
    if isinstance(config.moe_layer_freq, int):
        layers = -(-config.num_layers // config.moe_layer_freq)
    out = {}
    for name in names:
        tracker = get_moe_metrics_tracker()
        tracker.ensure_initialized(name, config.num_layers)
        values = tracker.metrics[name].values
        total = values.double().sum()
        values.zero_()
        dist.all_reduce(total)
        count = num_micro_batches if name.startswith("global") else config.moe_micro_batches  # type: ignore[attr-defined]
        out[f"moe_{name}"] = float(total) / (count * layers)
    return out
