"""Paths of a configuration made absolute, once: the run's processes have working directories of their own."""

from __future__ import annotations

import os
from dataclasses import replace

from vime.config.run import RunConfig

__all__ = ["with_absolute_paths"]


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """`config` with every path field absolute, read relative to the current directory. Slices and placeholders are kept."""
    return replace(
        config,
        model=replace(config.model, hf_checkpoint=_absolute(config.model.hf_checkpoint), ref_load=_absolute(config.model.ref_load)),
        data=replace(config.data, prompt_data=_absolute(config.data.prompt_data)),
        eval=replace(
            config.eval,
            eval_prompt_data=[os.path.abspath(word) if i % 2 else word for i, word in enumerate(config.eval.eval_prompt_data)],
        ),
        checkpoint=replace(
            config.checkpoint,
            save=_absolute(config.checkpoint.save),
            load=_absolute(config.checkpoint.load),
            save_hf=_absolute(config.checkpoint.save_hf),
        ),
        logging=replace(
            config.logging, log_dir=_absolute(config.logging.log_dir), tb_project_name=_absolute(config.logging.tb_project_name)
        ),
    )


def _absolute(path: str | None) -> str | None:
    """abspath leaves a last component such as 'file.jsonl@[0:10]' alone; an empty path stays empty, for its reader to refuse."""
    return os.path.abspath(path) if path else path
