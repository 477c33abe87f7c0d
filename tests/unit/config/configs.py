"""A valid configuration without a command line, and changed copies of it."""

import dataclasses
from pathlib import Path
from typing import Any

from vime.config import RunConfig


def valid_config(folder: Path) -> RunConfig:
    """Two GRPO steps on a prompt file made in `folder`."""
    (folder / "p.jsonl").write_text('{"input": "1"}\n')
    return change(
        RunConfig(),
        hf_checkpoint=str(folder),
        prompt_data=str(folder / "p.jsonl"),
        num_rollout=2,
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        rm_type="math",
    )


def change(config: RunConfig, **values: Any) -> RunConfig:
    """`config` with fields of its sections replaced."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section = next(f.name for f in dataclasses.fields(config) if hasattr(getattr(config, f.name), name))
        sections.setdefault(section, {})[name] = value
    return dataclasses.replace(config, **{s: dataclasses.replace(getattr(config, s), **v) for s, v in sections.items()})
