"""Masks of conversations: exactly the template's tokens, exactly what the assistant says, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.rollout.support import CHATML, make_tokenizer
from vime.data.loss_mask import MultiTurnLossMaskGenerator
from vime.errors import ConfigError, DataError

# Thinking is kept only after the last user turn, consecutive tool results share one turn: Qwen3's two habits.
QWEN3 = """{%- set ns = namespace(last=0) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- set parts = message.content.split('</think>') -%}
{{- '<|im_start|>assistant\n' -}}
{%- set thinking = parts[0].replace('<think>', '').strip() if parts|length > 1 else '' -%}
{%- if loop.index0 > ns.last -%}{{- '<think>\n' + thinking + '\n</think>\n\n' -}}{%- endif -%}
{{- parts[-1].strip() + '<|im_end|>\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- else -%}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2*3?"},
    {"role": "assistant", "content": "<think>\nproduct\n</think>\n\ncall"},
    {"role": "tool", "content": "6"},
    {"role": "tool", "content": "six"},
    {"role": "assistant", "content": "<think>\nso six\n</think>\n\n6"},
    {"role": "user", "content": "and 4*4?"},
    {"role": "assistant", "content": "<think>\nsquare\n</think>\n\n16"},
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One tokenizer a template."""
    return {name: make_tokenizer(tmp_path_factory.mktemp(name), template=text) for name, text in (("qwen", CHATML), ("qwen3", QWEN3))}


def masked(tokenizer: Any, kind: str, messages: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """The conversation's text, and its trained pieces."""
    ids, mask = MultiTurnLossMaskGenerator(tokenizer, kind).get_loss_mask(messages)
    assert len(ids) == len(mask)
    pieces: list[list[int]] = []
    last = 0
    for token, flag in zip(ids, mask, strict=True):
        if flag and not last:
            pieces.append([])
        if flag:
            pieces[-1].append(token)
        last = flag
    return tokenizer.decode(ids), [tokenizer.decode(piece) for piece in pieces]


def test_plain_chatml_trains_each_assistant_turn_up_to_its_end_token(tokenizers: dict[str, Any]) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    chat.append({"role": "assistant", "content": "d"})
    text, trained = masked(tokenizers["qwen"], "qwen", chat)
    assert text == tokenizers["qwen"].apply_chat_template(chat, tokenize=False)
    assert trained == ["b<|im_end|>", "d<|im_end|>"]


def test_qwen3_trains_what_the_whole_template_shows_thinking_dropped_from_earlier_turns(tokenizers: dict[str, Any]) -> None:
    text, trained = masked(tokenizers["qwen3"], "qwen3", CHAT)
    assert text == tokenizers["qwen3"].apply_chat_template(CHAT, tokenize=False)
    assert trained == ["call<|im_end|>", "6<|im_end|>", "<think>\nsquare\n</think>\n\n16<|im_end|>"]


def test_thinking_between_tool_calls_of_the_last_turn_is_trained(tokenizers: dict[str, Any]) -> None:
    _, trained = masked(tokenizers["qwen3"], "qwen3", CHAT[:6])
    assert trained == ["<think>\nproduct\n</think>\n\ncall<|im_end|>", "<think>\nso six\n</think>\n\n6<|im_end|>"]


def test_a_template_that_looks_ahead_is_refused_by_the_plain_type_rather_than_masked_wrong(tokenizers: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"rendered differently alone.*--loss-mask-type"):
        masked(tokenizers["qwen3"], "qwen", CHAT)


def test_a_turn_can_be_left_out(tokenizers: dict[str, Any]) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "step_loss_mask": 0}]
    chat += [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    assert masked(tokenizers["qwen"], "qwen", chat)[1] == ["d<|im_end|>"]


def test_tokens_that_merge_across_turns_are_refused(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ '>' + m.content if m.role == 'assistant' else m.content }}{% endfor %}"
    merging = make_tokenizer(tmp_path, template=template + "{% if add_generation_prompt %}>{% endif %}", merges=(("a", ">"),))
    with pytest.raises(DataError, match="merges across turns"):
        masked(merging, "qwen", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])


def test_a_template_that_does_not_open_the_assistants_turn_is_refused(tmp_path: Path) -> None:
    glued = make_tokenizer(
        tmp_path, template="{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    with pytest.raises(DataError, match="generation prompt"):
        masked(glued, "qwen", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])


def test_response_lengths_count_from_the_first_trained_token(tokenizers: dict[str, Any]) -> None:
    masks = MultiTurnLossMaskGenerator(tokenizers["qwen"])
    assert masks.get_response_lengths([[0, 0, 1, 0, 1], [0, 0], [1]]) == [3, 0, 1]


def test_an_unknown_type_is_refused(tokenizers: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Known are distill_qwen, qwen, qwen3, qwen3_5"):
        MultiTurnLossMaskGenerator(tokenizers["qwen"], "llama")
