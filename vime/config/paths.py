"""Paths of a configuration made absolute, once: the run's processes have working directories of their own."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from vime.config.fields import flag_specs
from vime.config.prompt_sources import joined, split_sources
from vime.config.run import SECTIONS, RunConfig

__all__ = ["with_absolute_paths"]


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """`config` with every path field absolute, read relative to the current directory. Slices and placeholders are kept."""
    changed: dict[str, Any] = {}
    for section, cls in SECTIONS.items():
        old = getattr(config, section)
        changed[section] = replace(old, **{s.name: _absolute(getattr(old, s.name)) for s in flag_specs(cls) if s.path is not None})
    words = [os.path.abspath(word) if i % 2 else word for i, word in enumerate(config.eval.eval_prompt_data)]
    changed["data"] = replace(changed["data"], prompt_data=_absolute_sources(config.data.prompt_data))
    changed["eval"] = replace(changed["eval"], eval_prompt_data=words)
    return replace(config, **changed)


def _absolute(path: str | None) -> str | None:
    """abspath leaves a last component such as 'file.jsonl@[0:10]' alone; an empty path stays empty, for its reader to refuse."""
    return os.path.abspath(path) if path else path


def _absolute_sources(prompt_data: str | None) -> str | None:
    if not prompt_data:
        return prompt_data
    return joined([replace(source, spec=os.path.abspath(source.spec)) for source in split_sources(prompt_data)])
