"""How a configuration field states its flag, its bounds and its one line of documentation."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

__all__ = ["FlagSpec", "flag_specs", "opt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagSpec:
    """What the command line needs to know of one field."""

    name: str  # the field's name; the flag is --name with dashes unless `flag` says otherwise
    doc: str
    default: Any
    type: type  # bool, int, float, str or dict (JSON)
    flag: str
    negated: bool = False  # the flag switches the field off (--disable-...)
    many: bool = False  # takes one or more values
    choices: tuple[str, ...] | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    megatron: str | None = None  # handed on to Megatron's parser under this flag
    required: bool = False


def opt(default: Any, doc: str, **meta: Any) -> Any:
    """A field of a section: default, one line of documentation, and optional bounds (ge, gt, le, choices, ...)."""
    meta = {"doc": doc, **meta}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=meta)
    return field(default=default, metadata=meta)


def flag_specs(section: type) -> list[FlagSpec]:
    """The flags of one section class, in the order of its fields."""
    specs = []
    for f in fields(section):
        meta = dict(f.metadata)
        if "doc" not in meta:
            continue  # derived, not a flag
        default = f.default
        if default is MISSING and f.default_factory is not MISSING:
            default = f.default_factory()
        kind = meta.pop("type", None) or (type(default) if default is not None else str)
        flag = meta.pop("flag", None) or "--" + f.name.replace("_", "-")
        specs.append(FlagSpec(name=f.name, default=default, type=kind, flag=flag, **meta))
    return specs
