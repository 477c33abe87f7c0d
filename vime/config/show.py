"""`--print-config`: every value with its source, as a file that --config takes.

What was given stands as a line of its own; what is a default or follows from something else stands behind "#", so that
feeding the file back gives the same configuration and no flag counts as given that was not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from vime import __version__
from vime.config.fields import FlagSpec, flag_specs
from vime.config.owners import OWNERS
from vime.config.parse import is_switch
from vime.config.run import SECTIONS, RunConfig
from vime.config.suggest import with_prefix

__all__ = ["shown"]

_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]*|-?\d[\d.eE+-]*")
_UNSEEN = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")  # what YAML does not take as it is
_WORDS = frozenset("true false yes no on off y n null none ~".split())  # YAML 1.1 takes some of these for more than text


def shown(config: RunConfig) -> str:
    """The text of `--print-config`."""
    lines = [f"# vime {__version__}: value  # source. Lines behind '#' were not given.", *_derived(config)]
    for section, cls in SECTIONS.items():
        rows = list(_own_rows(config, section, cls))
        extra = list(_owner_rows(config, section)) if section in OWNERS else []
        lines += ["", *_table(section, rows + extra)]
    for owner in OWNERS:
        rows = list(_owner_rows(config, owner))
        if owner not in SECTIONS and rows:
            lines += ["", *_table(owner, rows)]
    return "\n".join([*lines, "", *_megatron_rest(config)])


def _table(name: str, rows: Sequence[str]) -> list[str]:
    """One table; behind "#" altogether when nothing in it was given."""
    given = any(not row.startswith("#") for row in rows)
    return [f"{name}:" if given else f"# {name}:", *(f"  {row}" for row in rows)]


def _own_rows(config: RunConfig, section: str, cls: type) -> Iterator[str]:
    done: set[str] = set()
    for spec in flag_specs(cls):
        if spec.name in done:
            continue  # the second flag of a field that has two
        done.add(spec.name)
        value = getattr(getattr(config, section), spec.name)
        source = config.sources.get(spec.name)
        name = spec.flag.removeprefix("--")
        if source is None:
            yield f"# {name}: {_own_value(spec, value)}  # default"
        else:
            yield f"{name}: {_own_value(spec, value)}  # {source}"


def _own_value(spec: FlagSpec, value: Any) -> str:
    if value is None:
        return "null"
    if is_switch(spec):
        return "true" if value != spec.negated else "false"
    if isinstance(value, dict):
        return "'" + json.dumps(value).replace("'", "''") + "'"  # JSON in quotes: YAML would read 1e-5 as text
    if isinstance(value, list):
        return "[" + ", ".join(_text(str(item)) for item in value) + "]"
    return _text(str(value))


def _text(text: str) -> str:
    """A scalar that reads back as the same text."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return _UNSEEN.sub(lambda match: f"\\u{ord(match.group()):04x}", json.dumps(text, ensure_ascii=False))


def _owner_rows(config: RunConfig, owner: str) -> Iterator[str]:
    groups: list[list[str]] = []
    for token in getattr(config, f"{owner}_tokens"):
        if token.startswith("--"):
            flag, equals, value = token.partition("=")
            groups.append([flag, value] if equals else [flag])
        else:
            groups[-1].append(token)
    flags = [group[0] for group in groups]
    for flag, *values in groups:
        typed = with_prefix(flag, owner)
        if flags.count(flag) > 1:
            yield f"# {' '.join([typed, *values])}  # given more than once, which a file cannot say: add it on the command line"
            continue
        name, value = flag.removeprefix("--"), "true"
        if not values and owner == "vllm" and flag.startswith("--no-"):
            name, value = flag.removeprefix("--no-"), "false"
        elif values:
            value = _text(values[0]) if len(values) == 1 else "[" + ", ".join(_text(word) for word in values) + "]"
        yield f"{name}: {value}  # {config.sources.get(typed) or config.sources.get(typed.replace('_', '-')) or 'given'}"


def _derived(config: RunConfig) -> Iterator[str]:
    """What follows from several flags."""
    data = config.data
    samples = (data.rollout_batch_size or 0) * data.n_samples_per_prompt
    facts = {
        "trainer processes": config.actor_world_size,
        "data-parallel size": config.data_parallel_size,
        "engines": config.num_engines,
        "samples in a rollout step": samples,
        "rollouts in an optimizer step": data.global_batch_size or samples // (data.num_steps_per_rollout or 1),
    }
    yield "# derived: " + ", ".join(f"{name} {value}" for name, value in facts.items())


def _megatron_rest(config: RunConfig) -> Iterator[str]:
    """Megatron's other values: those that the model or the platform decides, then its defaults."""
    given = {token.partition("=")[0].removeprefix("--").replace("-", "_") for token in config.megatron_tokens if token.startswith("--")}
    own = {spec.name for cls in SECTIONS.values() for spec in flag_specs(cls)}
    rest = {name: value for name, value in config.megatron.items() if name not in given and name not in own}
    origins = {name: config.sources.get(f"megatron.{name}", "") for name in rest}
    if rest:
        yield "# Megatron's other arguments, by destination:"
    for name in sorted(rest, key=lambda name: (not origins[name], name)):
        said = {"model": "from the model folder", "platform": "decided by the platform"}.get(origins[name], "Megatron default")
        yield f"#   {name}: {json.dumps(rest[name])}  # {said}"
