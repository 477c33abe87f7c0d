"""From rows of a prompt file to `Sample`s that wait for generation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vime.data.jsonl import Row, check_value, parse_json
from vime.data.tables import open_table
from vime.data.tokenizer import encode_prompt, render_chat
from vime.errors import DataError
from vime.utils.types import Sample

__all__ = ["PromptFormat", "PromptSet", "fresh_copy", "load_prompts", "prompt_length", "sample_from_row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """Which columns a prompt file has, and how prompts are rendered."""

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str = "tools"
    apply_chat_template: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_prompt_len: int | None = None  # tokens; longer prompts are dropped
    rm_type: str | None = None  # --rm-type; a row's metadata["rm_type"] goes before it
    needs_label: frozenset[str] = frozenset()  # rm_types that cannot do without a label
    flag_prefix: str = "--"  # "--eval-" in messages about held-out files

    @classmethod
    def of(cls, args: Any, *, needs_label: frozenset[str] = frozenset(), evaluation: bool = False) -> PromptFormat:
        """The format that `args` asks for; a custom reward decides itself whether it needs a label."""
        custom = args.custom_rm_path is not None
        context = args.rollout_max_context_len
        longest = args.rollout_max_prompt_len if args.rollout_max_prompt_len is not None else (context - 1 if context else None)
        return cls(
            input_key=(args.eval_input_key if evaluation else None) or args.input_key,
            label_key=(args.eval_label_key if evaluation else None) or args.label_key,
            metadata_key=args.metadata_key,
            tool_key=args.tool_key,
            apply_chat_template=args.apply_chat_template,
            template_kwargs=dict(args.apply_chat_template_kwargs),
            max_prompt_len=longest,
            rm_type=None if custom else args.rm_type,
            needs_label=frozenset() if custom else needs_label,
            flag_prefix="--eval-" if evaluation else "--",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The prompts of one file, in its order."""

    samples: tuple[Sample, ...]
    num_dropped: int  # longer than max_prompt_len


def load_prompts(spec: str, form: PromptFormat, tokenizer: Any, *, flag: str = "--prompt-data") -> PromptSet:
    """Read, render and measure the prompts of one file, all of them: for held-out files.

    Raises:
        DataError: as `open_table`; a column is missing; a prompt is empty; a label that the reward needs is missing, null
            or empty; or every prompt is longer than the limit.
    """
    samples = []
    table = open_table(spec, flag=flag)
    for row in map(table.row, range(len(table))):
        sample = sample_from_row(row, form, tokenizer)
        if form.max_prompt_len is None or prompt_length(sample, row, tokenizer) <= form.max_prompt_len:
            samples.append(sample)
    if not samples:
        raise DataError(
            f"{flag} {spec}: all {len(table)} prompts are longer than {form.max_prompt_len} tokens. "
            "Raise --rollout-max-prompt-len (and --rollout-max-context-len), or give shorter prompts."
        )
    return PromptSet(samples=tuple(samples), num_dropped=len(table) - len(samples))


def sample_from_row(row: Row, form: PromptFormat, tokenizer: Any = None) -> Sample:
    """One row as a pending `Sample`; without a tokenizer the prompt is checked but not rendered."""
    prompt = row.column(form.input_key, flag=f"{form.flag_prefix}input-key", what="the prompt")
    messages = _messages(prompt, row)
    metadata = _metadata(row, form)
    tools = row.data.get(form.tool_key)
    if tools is not None:
        tools = _parsed(tools, row, form.tool_key)
        metadata["tools"] = tools
    label = _label(row, form, metadata)
    kwargs = form.template_kwargs or None
    if form.apply_chat_template and tokenizer is not None:
        chat = messages if messages is not None else [{"role": "user", "content": prompt}]
        prompt = render_chat(tokenizer, chat, tools=tools, where=row.where, **form.template_kwargs)
    return Sample(prompt=prompt, label=label, metadata=metadata, apply_chat_template_kwargs=kwargs)


def fresh_copy(sample: Sample) -> Sample:
    """A deep copy: nothing that is changed in it, however deep, changes `sample`. Quick where the values came out of JSON."""
    twin = copy.copy(sample)
    for name, value in sample.__dict__.items():
        if not isinstance(value, _IMMUTABLE):
            twin.__dict__[name] = _own(value)
    return twin


_IMMUTABLE = (str, int, float, bool, type(None), Sample.Status)


def _own(value: Any) -> Any:
    if isinstance(value, _IMMUTABLE):
        return value
    if type(value) is dict:
        return {key: _own(item) for key, item in value.items()}
    if type(value) is list:
        return [_own(item) for item in value]
    return copy.deepcopy(value)


def prompt_length(sample: Sample, row: Row, tokenizer: Any) -> int:
    """Tokens of the prompt."""
    kwargs = sample.apply_chat_template_kwargs or {}
    return len(encode_prompt(tokenizer, sample.prompt, where=row.where, tools=sample.metadata.get("tools"), **kwargs))


def _messages(prompt: Any, row: Row) -> list[dict[str, Any]] | None:
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"{row.where}: the prompt is empty, so there is nothing to continue. Give a prompt or remove the row.")
        return None
    good = isinstance(prompt, Sequence) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt)
    if not good:
        raise DataError(
            f"{row.where}: the prompt is neither text nor a list of chat messages: {str(prompt)[:120]!r}. "
            'A message looks like {"role": "user", "content": "..."}.'
        )
    return list(prompt)


def _metadata(row: Row, form: PromptFormat) -> dict[str, Any]:
    value = row.data.get(form.metadata_key)
    if value is None:
        return {}
    value = _parsed(value, row, form.metadata_key)
    if not isinstance(value, dict):
        raise DataError(f"{row.where}: column '{form.metadata_key}' must hold an object, got {type(value).__name__}: {str(value)[:120]!r}.")
    return dict(value)


def _parsed(value: Any, row: Row, key: str) -> Any:
    parsed = parse_json(value, row.where, f"the text in column '{key}'") if isinstance(value, str) else value
    check_value(parsed, row.where, f"column '{key}'")
    return parsed


def _label(row: Row, form: PromptFormat, metadata: dict[str, Any]) -> Any:
    kind = str(metadata.get("rm_type") or form.rm_type or "").removeprefix("boxed_")
    needed = kind in form.needs_label and form.needs_label
    if form.label_key is None:
        if needed:
            have = ", ".join(f"'{name}'" for name in row.data)
            raise DataError(f"{row.where}: reward '{kind}' compares with a label, but --label-key is not given; the row has {have}.")
        return None
    label = row.column(form.label_key, flag=f"{form.flag_prefix}label-key", what="the label")
    empty = label is None or (isinstance(label, str) and not label.strip()) or (isinstance(label, list | dict) and not label)
    if empty and needed:
        found = "null" if label is None else f"empty ({label!r})"
        raise DataError(
            f"{row.where}: the label under '{form.label_key}' is {found}, but reward '{kind}' compares with it. "
            "Give a label or drop the row."
        )
    return label
