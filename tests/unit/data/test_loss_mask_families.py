"""Masks for Qwen3.5's and DeepSeek-R1's distillations' form of template: whatever the conversation, all and only what the model writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.unit.rollout.support import make_tokenizer
from vime.data.loss_mask import MultiTurnLossMaskGenerator
from vime.errors import DataError

# Thinking is kept after the last question alone, where each answer has it, be it empty; tool calls are XML; a question must be there.
QWEN3_5 = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
{%- set result = m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>') -%}
{%- if m.role == 'user' and not result -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if ns.last < 0 -%}{{- raise_exception('No user query found in messages.') -}}{%- endif -%}
{%- if tools -%}{{- '<|im_start|>system\n<tools>' -}}{%- for tool in tools -%}{{- '\n' + tool | tojson -}}{%- endfor -%}
{{- '\n</tools><|im_end|>\n' -}}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > ns.last -%}{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' -}}{%- endif -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- '<tool_call>\n<function=' + call.function.name + '>\n' -}}
{%- for name, value in call.function.arguments.items() -%}
{{- '<parameter=' + name + '>\n' + value + '\n</parameter>\n' -}}
{%- endfor -%}{{- '</function>\n</tool_call>' -}}
{%- endfor -%}{{- '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}"""

# The system prompt goes first, thinking is dropped unless tools have answered before, and tools' results stand before the same answer.
DISTILLED = """{%- set ns = namespace(tool=false, system='') -%}
{%- for m in messages -%}{%- if m.role == 'system' -%}{%- set ns.system = m.content -%}{%- endif -%}{%- endfor -%}
{{- bos_token + ns.system -}}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.tool = false -%}{{- '<｜User｜>' + m.content -}}
{%- elif m.role == 'assistant' and m.content is none -%}{%- set ns.tool = false -%}
{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' -}}
{%- for call in m.tool_calls -%}{{- call.function.name + '\n' + call.function.arguments -}}{%- endfor -%}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' -}}
{%- elif m.role == 'assistant' and ns.tool -%}{%- set ns.tool = false -%}
{{- '<｜tool▁outputs▁end｜>' + m.content + '<｜end▁of▁sentence｜>' -}}
{%- elif m.role == 'assistant' -%}
{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' -}}
{%- elif m.role == 'tool' -%}
{{- '' if ns.tool else '<｜tool▁outputs▁begin｜>' -}}{%- set ns.tool = true -%}{{- '\n' + m.content -}}
{%- endif -%}
{%- endfor -%}
{%- if ns.tool -%}{{- '<｜tool▁outputs▁end｜>' -}}{%- endif -%}
{%- if add_generation_prompt and not ns.tool -%}{{- '<｜Assistant｜>OPENING' -}}{%- endif -%}"""

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
MARKS += [f"<｜{name}｜>" for name in ("User", "Assistant", "begin▁of▁sentence", "end▁of▁sentence")]
MARKS += [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "outputs▁begin", "outputs▁end")]
TEMPLATES = {
    "qwen3_5": QWEN3_5,
    "distilled": DISTILLED.replace("OPENING", ""),
    "distilled_thinking": DISTILLED.replace("OPENING", "<think>\\n"),
}
Messages = list[dict[str, Any]]

words = st.text("ab<> \n", min_size=1, max_size=6).map(str.strip).filter(bool)
thinking = st.one_of(st.just(""), words)
results = st.lists(words.map(lambda text: {"role": "tool", "content": text}), min_size=1, max_size=2)
system = st.lists(words.map(lambda text: {"role": "system", "content": text}), max_size=1)


def call(arguments: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "look", "arguments": arguments}}]


@st.composite
def qwen_conversations(draw: Callable[..., Any]) -> Messages:
    out: Messages = draw(system)
    for _ in range(draw(st.integers(1, 3))):
        out.append({"role": "user", "content": draw(words)})
        for _ in range(draw(st.integers(0, 2))):
            text = draw(st.one_of(st.just(""), words))
            out.append({"role": "assistant", "content": text, "reasoning_content": draw(thinking), "tool_calls": call({"at": draw(words)})})
            out += draw(results)
        out.append({"role": "assistant", "content": draw(words), "reasoning_content": draw(thinking)})
    return out


def qwen_answers(messages: Messages) -> list[str]:
    """What the model writes in each of its turns."""
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    out = []
    for i, message in enumerate(m if m["role"] == "assistant" else None for m in messages):
        if message is not None:
            thought = message["reasoning_content"] + "\n</think>\n\n" if i > last and message["reasoning_content"] else ""
            calls = "".join(
                f"<tool_call>\n<function=look>\n<parameter=at>\n{one['function']['arguments']['at']}\n</parameter>\n</function>\n</tool_call>"
                for one in message.get("tool_calls", ())
            )
            out.append(f"{thought}{message['content']}{calls}<|im_end|>")
    return out


@st.composite
def distilled_conversations(draw: Callable[..., Any]) -> Messages:
    def answer() -> dict[str, Any]:
        thought, text = draw(thinking), draw(words)
        return {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{text}" if thought else text}

    out: Messages = draw(system)
    for _ in range(draw(st.integers(1, 3))):
        out.append({"role": "user", "content": draw(words)})
        if draw(st.booleans()):
            out.append({"role": "assistant", "content": None, "tool_calls": call(draw(words))})
            out += draw(results)
        out.append(answer())
    return out


def distilled_answers(messages: Messages, opened: bool) -> list[str]:
    out = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        text = message["content"]
        if text is None:
            text = f"<｜tool▁calls▁begin｜>look\n{message['tool_calls'][0]['function']['arguments']}<｜tool▁calls▁end｜>"
        elif messages[i - 1]["role"] == "tool":
            pass  # the template leaves it as it is
        elif i < len(messages) - 1:
            text = text.split("</think>")[-1]
        elif opened:
            text = text.removeprefix("<think>\n")
        out.append(text + "<｜end▁of▁sentence｜>")
    return out


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = {}
    for name, template in TEMPLATES.items():
        out[name] = make_tokenizer(tmp_path_factory.mktemp(name), template=template)
        out[name].add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
        if name != "qwen3_5":
            out[name].bos_token, out[name].eos_token = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    return out


def trained_pieces(tokenizer: Any, ids: list[int], mask: list[int]) -> list[str]:
    pieces: list[list[int]] = []
    for token, flag, before in zip(ids, mask, [0, *mask], strict=False):
        if flag and not before:
            pieces.append([])
        if flag:
            pieces[-1].append(token)
    return [tokenizer.decode(piece) for piece in pieces]


@settings(max_examples=60, deadline=None)
@given(messages=qwen_conversations(), tools=st.sampled_from([None, [{"name": "look"}]]))
def test_qwen3_5_trains_what_the_template_shows_of_each_answer(tokenizers: dict[str, Any], messages: Messages, tools: Any) -> None:
    tokenizer = tokenizers["qwen3_5"]
    ids, mask = MultiTurnLossMaskGenerator(tokenizer, "qwen3_5").get_loss_mask(messages, tools=tools)
    assert ids == tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False)
    assert trained_pieces(tokenizer, ids, mask) == qwen_answers(messages)


@settings(max_examples=60, deadline=None)
@given(messages=distilled_conversations(), kind=st.sampled_from(["distilled", "distilled_thinking"]))
def test_distill_qwen_trains_each_answer_and_the_last_ones_thinking(tokenizers: dict[str, Any], messages: Messages, kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids, mask = MultiTurnLossMaskGenerator(tokenizer, "distill_qwen").get_loss_mask(messages)
    opened = kind == "distilled_thinking"
    answers = distilled_answers(messages, opened)
    assert trained_pieces(tokenizer, ids, mask) == answers
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    thinks = "</think>" in messages[-1]["content"]
    shown = prompt + answers[-1] if thinks else tokenizer.apply_chat_template(messages, tokenize=False)
    assert ids == tokenizer.encode(shown, add_special_tokens=False)


def test_a_conversation_whose_last_answer_has_no_thinking_is_the_templates(tokenizers: dict[str, Any]) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<b>"}]
    ids, mask = MultiTurnLossMaskGenerator(tokenizers["distilled_thinking"], "distill_qwen").get_loss_mask(chat)
    assert tokenizers["distilled_thinking"].decode(ids) == "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜><b><｜end▁of▁sentence｜>"
    assert sum(mask) == len("<b>") + 1


@pytest.mark.parametrize("kind", ["qwen3_5", "distill_qwen"])
def test_a_turn_that_is_not_to_be_trained_is_not(tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer = tokenizers["qwen3_5" if kind == "qwen3_5" else "distilled"]
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "step_loss_mask": 0}]
    chat += [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    ids, mask = MultiTurnLossMaskGenerator(tokenizer, kind).get_loss_mask(chat)
    assert trained_pieces(tokenizer, ids, mask) == ["d" + tokenizer.eos_token]


@pytest.mark.parametrize(
    ("kind", "template", "said"),
    [
        ("qwen3_5", "distilled", "is for templates whose generation prompt opens the thinking; this one's is '<｜Assistant｜>'"),
        ("distill_qwen", "qwen3_5", "is not opened by <｜Assistant｜>"),
    ],
)
def test_a_template_of_another_family_is_refused(tokenizers: dict[str, Any], kind: str, template: str, said: str) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match=said):
        MultiTurnLossMaskGenerator(tokenizers[template], kind).get_loss_mask(chat)
