"""The tokenizer of the model that is trained, and prompts rendered and encoded with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vime.errors import CheckpointError, DataError

__all__ = ["encode_prompt", "load_tokenizer", "render_chat"]

Message = dict[str, Any]


def load_tokenizer(path: str | None) -> Any:
    """The tokenizer in a local Hugging Face folder (`--hf-checkpoint`); nothing is downloaded.

    Raises:
        CheckpointError: no folder given, it does not exist, or holds no tokenizer that loads.
    """
    if not path:
        raise CheckpointError("No tokenizer: --hf-checkpoint is not given. Name the model's Hugging Face folder.")
    if not Path(path).is_dir():
        raise CheckpointError(f"--hf-checkpoint {path}: no such folder. Give the local folder of a Hugging Face model.")
    from transformers import AutoTokenizer  # takes seconds to import; only runs that read prompts pay for it

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"--hf-checkpoint {path}: its tokenizer does not load ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "The folder needs tokenizer.json and tokenizer_config.json (tokenizer.save_pretrained writes both)."
        ) from error


def render_chat(
    tokenizer: Any,
    messages: list[Message],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    where: str = "prompt",
    **kwargs: Any,
) -> str:
    """Chat messages as the text that the model's template makes of them.

    Raises:
        DataError: the tokenizer has no chat template, or the template refuses these messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{where}: the prompt is a list of chat messages, but the tokenizer has no chat_template. Add one to the model folder."
        )
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs)
    except Exception as error:  # templates are programs of others, and Jinja raises kinds of its own
        raise DataError(
            f"{where}: the chat template refuses the messages ({type(error).__name__}: {error}). Roles and contents must suit it."
        ) from error
    return str(text)


def encode_prompt(tokenizer: Any, prompt: str | list[Message], *, where: str = "prompt", **template_kwargs: Any) -> list[int]:
    """Token ids of a rendered prompt, or of chat messages; no special tokens are added to what the template wrote."""
    text = prompt if isinstance(prompt, str) else render_chat(tokenizer, prompt, where=where, **template_kwargs)
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
