"""Token ids and loss masks of conversations, for supervised training.

The conversation is rendered whole, once: those are the ids that are trained on, exactly what the engine would see. The
same template, applied to growing prefixes, says where each turn begins and ends; the pieces must join to the whole, in
text and in tokens, or the conversation is refused (per-message templating that only looks right is a known trap).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vime.data.tokenizer import render_chat
from vime.errors import ConfigError, DataError

__all__ = ["MultiTurnLossMaskGenerator"]

Message = dict[str, Any]
_PROBE = "vime-probe-of-a-later-turn"
_OPENING = "<|im_start|>assistant\n"
_THINKING = ("<think>\n\n</think>\n\n", "<think>\n")  # how Qwen3.5 opens an answer without and with thinking, in the generation prompt
_DISTILLED = "<｜Assistant｜>"


class MultiTurnLossMaskGenerator:
    """Masks for one family of chat templates.

    `qwen`          a turn's text does not depend on later turns (ChatML as Qwen2.5 writes it)
    `qwen3`         thinking is left out of turns that a later user turn follows, so a prefix is rendered with a stand-in for that turn
    `qwen3_5`       the same, and the generation prompt opens the thinking: neither that opening nor an empty thinking is trained
    `distill_qwen`  DeepSeek-R1's distillations: the template drops all thinking; the last answer's is put back, for it is trained
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        prefixes: dict[str, Callable[[list[Message], int, Any, str], str]] = {
            "qwen": self._plain_prefix,
            "qwen3": self._prefix_with_lookahead,
            "qwen3_5": self._prefix_with_lookahead,
            "distill_qwen": self._plain_prefix,
        }
        if tokenizer_type not in prefixes:
            raise ConfigError(f"--loss-mask-type {tokenizer_type}: not known. Known are {', '.join(sorted(prefixes))}.")
        self.tokenizer = tokenizer
        self._prefix = prefixes[tokenizer_type]
        headers = {"qwen3_5": self._header_with_thinking, "distill_qwen": self._header_of_distilled}
        self._header = headers.get(tokenizer_type, self._generation_prompt)
        self._whole = self._whole_with_last_thinking if tokenizer_type == "distill_qwen" else self._render

    def get_loss_mask(self, messages: list[Message], tools: Any = None, *, where: str = "conversation") -> tuple[list[int], list[int]]:
        """The conversation's token ids [T] and a mask [T]: 1 where the assistant speaks.

        The mask covers what a model generates in that turn: from after the generation prompt to the end-of-turn token. An
        assistant message with `"step_loss_mask": 0` is not trained.

        Raises:
            DataError: no assistant turn, or the pieces do not join to the whole (naming the turn).
        """
        if not any(message["role"] == "assistant" for message in messages):
            raise DataError(f"{where}: the conversation has no assistant turn to train on.")
        whole = self._whole(messages, tools, where)
        ids: list[int] = []
        mask: list[int] = []
        done = ""
        for first, stop in _turns(messages):
            upto = whole if stop == len(messages) else self._prefix(messages, stop, tools, where)
            if not (whole.startswith(upto) and upto.startswith(done)):
                raise DataError(
                    f"{where}: turn {first} ({messages[first]['role']}) is rendered differently alone than within the whole conversation, "
                    "so its place cannot be found. Choose the other --loss-mask-type, or a template that renders turns independently."
                )
            piece = upto[len(done) :]
            for text, trained in self._split_turn(messages, first, piece, tools, where):
                tokens = self._encode(text)
                ids += tokens
                mask += [int(trained)] * len(tokens)
            done = upto
        if done != whole or ids != self._encode(whole):
            raise DataError(f"{where}: the turns' tokens do not join to the whole conversation's: the tokenizer merges across turns.")
        return ids, mask

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        """For each mask, the number of tokens from the first trained one to the end."""
        return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]

    def _split_turn(self, messages: list[Message], first: int, piece: str, tools: Any, where: str) -> list[tuple[str, bool]]:
        """The turn's text cut into (text, trained): generation prompt, what the model writes, what follows its end token."""
        message = messages[first]
        if message["role"] != "assistant" or not message.get("step_loss_mask", 1):
            return [(piece, False)]
        header = self._header(messages, first, piece, tools, where)
        body = piece[len(header) :]
        end = self.tokenizer.eos_token
        cut = body.rfind(end) + len(end) if end and end in body else len(body)
        return [(text, trained) for text, trained in ((header, False), (body[:cut], True), (body[cut:], False)) if text]

    def _generation_prompt(self, messages: list[Message], first: int, piece: str, tools: Any, where: str) -> str:
        """What of `piece` the template's generation prompt has written."""
        if not first:
            return ""
        header = _common_start(self._opened(messages[:first], tools, where), piece)
        if not header:
            raise DataError(f"{where}: turn {first} (assistant) does not begin with the template's generation prompt.")
        return header

    def _opened(self, messages: list[Message], tools: Any, where: str) -> str:
        """What the template adds to `messages` for the model to go on from."""
        closed, opened = (self._render(messages, tools, where, generation=flag) for flag in (False, True))
        return opened[len(closed) :] if opened.startswith(closed) else ""

    def _header_with_thinking(self, messages: list[Message], first: int, piece: str, tools: Any, where: str) -> str:
        """The opening of the turn and of its thinking, which prompts hold in both modes; turns whose thinking was dropped have none."""
        opened = self._opened([{"role": "user", "content": _PROBE}], None, where)
        if not opened.startswith(_OPENING + "<think>"):
            raise DataError(
                f"{where}: --loss-mask-type qwen3_5 is for templates whose generation prompt opens the thinking; this one's is {opened!r}. "
                "Choose qwen3, or qwen for a template without thinking."
            )
        if not piece.startswith(_OPENING):
            raise DataError(f"{where}: turn {first} (assistant) does not begin with the template's generation prompt.")
        body = piece[len(_OPENING) :]
        return _OPENING + next((thinking for thinking in _THINKING if body.startswith(thinking)), "")

    def _header_of_distilled(self, messages: list[Message], first: int, piece: str, tools: Any, where: str) -> str:
        """The opening of the turn, and of its thinking where the generation prompt has it; an answer to tools has none."""
        if first and messages[first - 1]["role"] == "tool" and not piece.startswith(_DISTILLED):
            return ""
        if not piece.startswith(_DISTILLED):
            raise DataError(
                f"{where}: turn {first} (assistant) is not opened by {_DISTILLED}: --loss-mask-type distill_qwen is for the template of "
                "DeepSeek-R1's distillations."
            )
        opened = self._opened(messages[:first], tools, where)
        return opened if opened.startswith(_DISTILLED) and piece.startswith(opened) else _DISTILLED

    def _whole_with_last_thinking(self, messages: list[Message], tools: Any, where: str) -> str:
        """The conversation, its last answer with the thinking that the template would drop."""
        whole = self._render(messages, tools, where)
        content = messages[-1].get("content")
        if messages[-1]["role"] != "assistant" or not isinstance(content, str) or "</think>" not in content:
            return whole
        prompt = self._render(messages[:-1], tools, where, generation=True)
        if whole.startswith(prompt) and whole[len(prompt) :].startswith(content):  # an answer to tools keeps its thinking
            return whole
        opening = "<think>\n" if prompt.endswith("<think>\n") else ""
        return prompt + content.removeprefix(opening) + str(self.tokenizer.eos_token or "")

    def _plain_prefix(self, messages: list[Message], stop: int, tools: Any, where: str) -> str:
        return self._render(messages[:stop], tools, where)

    def _prefix_with_lookahead(self, messages: list[Message], stop: int, tools: Any, where: str) -> str:
        later_query = any(_is_query(message) for message in messages[stop:])
        if not later_query:
            return self._render(messages[:stop], tools, where)
        text = self._render([*messages[:stop], {"role": "user", "content": _PROBE}], tools, where)
        opening = "<|im_start|>user\n" + _PROBE
        if opening not in text:
            raise DataError(
                f"{where}: the chat template does not open user turns with <|im_start|>user; --loss-mask-type qwen3 and qwen3_5 "
                "need ChatML."
            )
        return text[: text.rindex(opening)]

    def _render(self, messages: list[Message], tools: Any, where: str, generation: bool = False) -> str:
        return render_chat(self.tokenizer, messages, tools=tools, add_generation_prompt=generation, where=where)

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=False)]


def _is_query(message: Message) -> bool:
    """A user's turn, and not a tool's result in the shape of one, before which thinking is kept."""
    content = message.get("content")
    result = isinstance(content, str) and content.startswith("<tool_response>") and content.endswith("</tool_response>")
    return message["role"] == "user" and not result


def _common_start(one: str, other: str) -> str:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return one[:length]


def _turns(messages: list[Message]) -> list[tuple[int, int]]:
    """(first, stop) of each turn: consecutive tool results are one turn, for templates write them as one."""
    turns: list[tuple[int, int]] = []
    for position, message in enumerate(messages):
        if message["role"] == "tool" and turns and messages[position - 1]["role"] == "tool":
            turns[-1] = (turns[-1][0], position + 1)
        else:
            turns.append((position, position + 1))
    return turns
