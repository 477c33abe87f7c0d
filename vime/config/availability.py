"""What is declared but not built yet: refused when it is asked for, never accepted and ignored."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from vime.config.fields import FlagSpec, flag_specs
from vime.config.run import SECTIONS, RunConfig

__all__ = ["not_available", "set_flags"]


def set_flags(config: RunConfig) -> list[FlagSpec]:
    """The flags that were typed, be it with their default's value, or whose field differs from the default."""
    return [
        spec
        for section, cls in SECTIONS.items()
        for spec in flag_specs(cls)
        if _is_set(spec, getattr(getattr(config, section), spec.name), config)
    ]


def _is_set(spec: FlagSpec, value: Any, config: RunConfig) -> bool:
    if spec.type is bool and spec.default is None:  # one field, two flags
        return value is not None and value != spec.negated
    return spec.name in config.given or value != spec.default


def not_available(config: RunConfig, *, but: Collection[str] = ()) -> Iterator[str]:
    """One sentence for each thing that `config` asks for and that is not built yet. Fields of `but` are left out."""
    for spec in set_flags(config):
        if spec.name in but:
            continue
        if spec.not_yet is not None:
            yield f"{spec.flag} is not available yet: {spec.not_yet}"
            continue
        value = getattr(config.args, spec.name)
        for word in value if isinstance(value, list) else [value]:
            if word in spec.choices_not_yet:
                built = [choice for choice in spec.choices or () if choice not in spec.choices_not_yet]
                yield f"{spec.flag} {word} is not available yet: use {' or '.join(built)}."
    cluster = config.cluster
    if cluster.actor_num_nodes > 1:
        yield "--actor-num-nodes above 1 is not available yet: use --actor-num-gpus-per-node for several trainer processes."
    if cluster.rollout_num_gpus_per_engine > 1:
        yield "--rollout-num-gpus-per-engine above 1 is not available yet: on CPU an engine has one worker. Start more engines instead."
