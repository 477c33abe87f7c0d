"""What `vime train --help` prints: our own flags by section."""

from __future__ import annotations

from vime.config.fields import FlagSpec, flag_specs
from vime.config.run import SECTIONS

__all__ = ["help_text"]


def help_text() -> str:
    """All our own flags, grouped by section, with defaults."""
    lines = [
        "usage: vime train --hf-checkpoint DIR --prompt-data FILE --rollout-batch-size N --num-rollout N [flags]",
        "",
        "Megatron's own flags are given under their own names, vLLM's as --vllm-X, vllm-router's as --router-X.",
    ]
    for section, cls in SECTIONS.items():
        lines += ["", f"{section}: {(cls.__doc__ or '').splitlines()[0]}"]
        for spec in flag_specs(cls):
            lines += _help_lines(spec)
    return "\n".join(lines)


def _help_lines(spec: FlagSpec) -> list[str]:
    kind = "" if spec.type is bool else " " + (f"{{{','.join(spec.choices)}}}" if spec.choices else spec.type.__name__.upper())
    default = "" if spec.type is bool or spec.default in (None, [], {}) else f" [{spec.default}]"
    return [f"  {spec.flag}{kind}{' ...' if spec.many else ''}", f"      {spec.doc}{default}{' (required)' if spec.required else ''}"]
