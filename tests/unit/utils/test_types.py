"""`Sample` as plug-ins of slime and Vime use it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from vime.utils.types import Sample

# slime's fields of Sample.
SLIME = {
    *(
        "group_index",
        "index",
        "rollout_id",
        "prompt",
        "tokens",
        "multimodal_inputs",
        "multimodal_train_inputs",
        "multimodal_train_input_id",
    ),
    *("apply_chat_template_kwargs", "response", "response_length", "label", "reward", "loss_mask", "weight_versions", "rollout_log_probs"),
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts", "remove_sample", "teacher_log_probs", "status"),
    *("metadata", "generate_function_path", "custom_rm_path", "train_metadata", "session_id", "non_generation_time", "spec_info"),
    *("prefix_cache_info",),
}
HOOKS = Path(__file__).parents[3] / "docs" / "hooks.md"


def test_every_field_of_slimes_is_here_or_among_the_documented_departures() -> None:
    departures = HOOKS.read_text(encoding="utf-8").partition("## Departures from slime")[2]
    missing = SLIME - {field.name for field in fields(Sample)}
    assert not {name for name in missing if f"`{name}`" not in departures}


def test_what_a_reply_says_of_itself_sets_status_and_versions() -> None:
    sample = Sample(tokens=[1], index=0)
    told = {"finish_reason": {"type": "length"}, "weight_version": 7, "e2e_latency": 0.1}
    sample.append_response_tokens(tokens=[2, 3], log_probs=[-0.1, -0.2], meta_info=told)
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.weight_versions == ["7", "7"]
    sample.append_response_tokens(tokens=[4], trainable=False, meta_info={"finish_reason": {"type": "stop"}}, update_terminal_info=False)
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.weight_versions == ["7", "7", ""]
    assert sample.loss_mask == [1, 1, 0]


def test_an_end_that_nobody_knows_is_refused_before_anything_is_appended() -> None:
    sample = Sample(tokens=[1], index=0)
    with pytest.raises(ValueError, match="finish_reason is 'lost'; known are stop, length, abort"):
        sample.append_response_tokens(tokens=[2], log_probs=[-0.1], meta_info={"finish_reason": {"type": "lost"}})
    assert sample.tokens == [1]
    assert sample.response_length == 0
