"""What a user would write for the hooks of the trainer. Each call is noted, for the tests to look at."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from vime.backends.megatron_utils.model import PackedGPTModel, gpt_model

CALLS: list[tuple[Any, ...]] = []
SILENCED = 102  # Sample.index


def init(args: Any) -> None:
    CALLS.append(("init", dist.is_initialized(), args.hf_checkpoint))


def before_log_prob(args: Any, model: list[Any], store_prefix: str) -> None:
    table = next(p for name, p in model[0].named_parameters() if "word_embeddings" in name)
    CALLS.append(("log_prob", store_prefix, table.double().sum().item()))


def before_train_step(args: Any, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, opt_param_scheduler: Any) -> None:
    still = not any(p.main_grad.any() for p in model[0].parameters())
    CALLS.append(("step", rollout_id, step_id, still, opt_param_scheduler.num_steps, len(optimizer.param_groups) > 0, args.loss_type))


def postprocess(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    CALLS.append(("data", rollout_id, sorted(rollout_data)))
    rollout_data["advantages"] = [2 * values for values in rollout_data["advantages"]]
    for mask, index in zip(rollout_data["loss_masks"], rollout_data["sample_indices"], strict=True):
        if index == SILENCED:
            mask.zero_()


class Halved(PackedGPTModel):
    """The hidden states count half before the output layer."""

    def forward(self, *args: Any, output_processor: Any, **kwargs: Any) -> torch.Tensor:
        def halved(*, hidden_states: torch.Tensor, **more: Any) -> torch.Tensor:
            return output_processor(hidden_states=hidden_states / 2, **more)

        return super().forward(*args, output_processor=halved, **kwargs)


def provide(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> PackedGPTModel:
    from megatron.training import get_args  # not in the driver, which checks this function and loads no Megatron

    CALLS.append(("provide", pre_process, post_process, vp_stage))
    model = gpt_model(get_args(), pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
    model.__class__ = Halved
    return model
