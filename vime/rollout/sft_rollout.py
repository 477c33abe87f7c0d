"""Supervised fine-tuning as a rollout function: conversations become samples to train on; no engine is needed.

--rollout-function-path vime.rollout.sft_rollout.generate_rollout --loss-type sft_loss
--disable-compute-advantages-and-returns --debug-train-only
"""

from __future__ import annotations

import statistics
from typing import Any

from vime.data.loss_mask import MultiTurnLossMaskGenerator
from vime.data.tokenizer import encode_prompt, load_tokenizer
from vime.errors import ConfigError, DataError
from vime.hooks import user_errors
from vime.rollout.base_types import Group, RolloutFnTrainOutput
from vime.rollout.generation import segments
from vime.utils.types import Sample

__all__ = ["generate_rollout", "to_trained"]


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """`rollout_batch_size` groups of conversations, tokenised and masked, in the data source's order.

    A row is either a conversation (the prompt column holds messages, assistant turns among them, and there is no label),
    trained on every assistant turn; or a prompt with a label: the answer, trained on as the response to the prompt.

    Raises:
        DataError: a row is neither, or its template cannot be masked (see `MultiTurnLossMaskGenerator`).
        ConfigError: asked to evaluate, which needs engines.
    """
    if evaluation:
        raise ConfigError("sft_rollout cannot evaluate: evaluation needs engines. Give --eval-function-path, or no --eval-prompt-data.")
    with user_errors("--data-source-path", args.data_source_path, type(data_source)):
        groups: list[Group] = data_source.get_samples(args.rollout_batch_size)
    resources = getattr(data_source, "resources", None)
    tokenizer = resources.tokenizer if resources is not None else load_tokenizer(args.hf_checkpoint)
    masks = MultiTurnLossMaskGenerator(tokenizer, args.loss_mask_type)
    for sample in (part for group in groups for part in segments(group)):
        to_trained(sample, tokenizer, masks)
    parts = [part for group in groups for part in segments(group)]
    return RolloutFnTrainOutput(
        samples=groups,
        metrics={
            "rollout/response_len/mean": statistics.fmean(part.response_length for part in parts),
            "rollout/total_tokens": float(sum(part.response_length for part in parts)),
            "rollout/trained_tokens": float(sum(part.effective_response_length for part in parts)),
        },
    )


def to_trained(sample: Sample, tokenizer: Any, masks: MultiTurnLossMaskGenerator) -> None:
    """Fill tokens, response_length (from the first trained token on) and loss_mask of `sample`."""
    where = f"sample {sample.index}"
    if sample.label is None:
        if isinstance(sample.prompt, str):
            raise DataError(
                f"{where}: plain text without a label has nothing to train on. Give the answer's column with --label-key, "
                "or conversations as lists of messages (without --apply-chat-template)."
            )
        tokens, mask = masks.get_loss_mask(sample.prompt, tools=sample.metadata.get("tools"), where=where)
    else:
        prompt = encode_prompt(
            tokenizer, sample.prompt, where=where, tools=sample.metadata.get("tools"), **(sample.apply_chat_template_kwargs or {})
        )
        answer = [*encode_prompt(tokenizer, str(sample.label), where=where), int(tokenizer.eos_token_id)]
        tokens, mask = prompt + answer, [0] * len(prompt) + [1] * len(answer)
    if 1 not in mask:
        raise DataError(f"{where}: no token of the conversation is trained (step_loss_mask is 0 everywhere).")
    sample.tokens = tokens
    sample.loss_mask = mask[mask.index(1) :]
    sample.response_length = len(sample.loss_mask)
    sample.response = tokenizer.decode(tokens[-sample.response_length :])
    sample.reward = 0.0
    sample.status = Sample.Status.COMPLETED
