"""How a configuration field states its flag, its bounds and its one line of documentation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

__all__ = ["SEEDS", "FlagSpec", "flag_specs", "opt"]

SEEDS = 2_000_000_000  # the largest seed: with what ranks add to it, every library takes it


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagSpec:
    """What the command line needs to know of one flag."""

    name: str  # the field's name; the flag is --name with dashes unless `flag` says otherwise
    doc: str
    default: Any
    type: type  # bool, int, float, str or dict (JSON)
    flag: str
    negated: bool = False  # the flag switches the field off (--disable-..., --no-...)
    many: bool = False  # takes one or more values
    choices: tuple[str, ...] | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    megatron: str | None = None  # handed on to Megatron's parser under this flag
    required: bool = False
    path: str | None = None  # "folder" or "file" that must exist, or "new": read relative to the current directory
    not_yet: str | None = None  # nothing reads the field yet: what is missing, and what to use instead
    choices_not_yet: tuple[str, ...] = ()  # those of `choices` that are not built yet


def opt(default: Any, doc: str, **meta: Any) -> Any:
    """A field of a section: default, one line of documentation, and optional bounds (ge, gt, le, choices, ...).

    With `type=bool` and default None the field has two flags, --x and --no-x; None is for whoever resolves the default.
    """
    meta = {"doc": doc, **meta}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=meta)
    return field(default=default, metadata=meta)


def flag_specs(section: type) -> list[FlagSpec]:
    """The flags of one section class, in the order of its fields."""
    return list(_specs(section))


def _specs(section: type) -> Iterator[FlagSpec]:
    for f in fields(section):
        meta = dict(f.metadata)
        if "doc" not in meta:
            continue  # derived, not a flag
        default = f.default
        if default is MISSING and f.default_factory is not MISSING:
            default = f.default_factory()
        kind = meta.pop("type", None) or (type(default) if default is not None else str)
        flag = meta.pop("flag", None) or "--" + f.name.replace("_", "-")
        spec = FlagSpec(name=f.name, default=default, type=kind, flag=flag, **meta)
        yield spec
        if kind is bool and default is None:
            yield replace(spec, flag="--no-" + flag.removeprefix("--"), negated=True)
