"""The pages that are made from the code:  python -m vime.config.docs   (in the repository's folder)

docs/configuration.md as a whole, and in docs/migrating.md what stands between two marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vime.config.effects import settings_without_effect
from vime.config.fields import FlagSpec, flag_specs
from vime.config.renamed import CHANGED, GONE, GONE_PREFIXES, RENAMED
from vime.config.run import SECTIONS

__all__ = ["configuration_page", "made_pages", "with_differences"]

BEGIN, END = "<!-- made by python -m vime.config.docs -->", "<!-- end of what is made -->"

HEAD = """# Configuration

Every flag of ours, by section. This page is made from the code by `python -m vime.config.docs`; a test compares them.

Megatron's own flags are given under Megatron's names, vLLM's as `--vllm-X`, vllm-router's as `--router-X`: their own parsers check them.
A flag that has no effect under the chosen setting is refused, as is one that is not available yet; the message says what would use it.
Where a default differs from slime's, [migrating.md](migrating.md) says why.
"""


def configuration_page() -> str:
    """The whole page, ending in one newline."""
    lines = [HEAD]
    for section, cls in SECTIONS.items():
        lines += [f"## {section}", "", _cell((cls.__doc__ or "").splitlines()[0]), "", "| flag | takes | default | |", "|---|---|---|---|"]
        lines += [*_rows(flag_specs(cls)), ""]
    return "\n".join(lines).rstrip() + "\n"


def _rows(specs: list[FlagSpec]) -> Iterator[str]:
    names = {spec.name: [other.flag for other in specs if other.name == spec.name] for spec in specs}
    for spec in specs:
        if spec.flag != names[spec.name][0]:
            continue  # the second flag of a field stands in the row of the first
        flags = ", ".join(f"`{flag}`" for flag in names[spec.name])
        yield f"| {flags} | {_cell(_takes(spec))} | {_cell(_default(spec))} | {_cell(_meaning(spec))} |"


def _takes(spec: FlagSpec) -> str:
    if spec.type is bool:
        return "nothing"
    kind = {int: "whole number", float: "number", str: "text", dict: "JSON object"}[spec.type]
    if spec.choices:
        kind = ", ".join(f"`{choice}`" for choice in spec.choices)
    bounds = [f"{sign} {bound:g}" for sign, bound in ((">=", spec.ge), (">", spec.gt), ("<=", spec.le)) if bound is not None]
    return f"{kind}{' ' if bounds else ''}{', '.join(bounds)}{' ...' if spec.many else ''}"


def _default(spec: FlagSpec) -> str:
    if spec.required:
        return "required"
    if spec.type is bool or spec.default in (None, [], {}):
        return ""
    return f"`{_plain(spec.default)}`"


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _meaning(spec: FlagSpec) -> str:
    parts = [spec.doc]
    if spec.not_yet:
        parts.append(f"**Not available yet:** {spec.not_yet}")
    if spec.choices_not_yet:
        parts.append(f"**Not available yet:** {', '.join(f'`{choice}`' for choice in spec.choices_not_yet)}.")
    parts += [f"No effect {_short(setting)}." for setting in settings_without_effect(spec.name)]
    return " ".join(parts)


def _short(setting: str) -> str:
    """The two partial runs are explained elsewhere: "with --debug-train-only, which starts no engines" without the clause."""
    return setting.partition(", which starts no ")[0]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def with_differences(page: str) -> str:
    """`page` with the tables of what differs from slime and Vime between its two marks. ValueError without them."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"docs/migrating.md must hold the marks '{BEGIN}' and '{END}' once each.")
    families = {f"{prefix}*": why for prefix, why in GONE_PREFIXES.items()}
    tables = [
        _table("Same name, other default or meaning", ("flag", "here, and why"), CHANGED),
        _table("Same value, other name", ("slime, Vime", "here"), {old: f"`{new}`" for old, new in RENAMED.items()}),
        _table("No flag here", ("slime, Vime", "why, and what to say instead"), GONE | families),
    ]
    return re.sub(f"{BEGIN}.*{END}", lambda _: "\n\n".join([BEGIN, *tables, END]), page, flags=re.DOTALL)


def _table(title: str, heads: tuple[str, str], rows: dict[str, str]) -> str:
    together: dict[str, list[str]] = {}
    for flag, text in rows.items():
        together.setdefault(text, []).append(f"`{flag}`")
    lines = [f"### {title}", "", f"| {heads[0]} | {heads[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {', '.join(flags)} | {_cell(text)} |" for text, flags in together.items())])


def made_pages(root: Path) -> dict[Path, str]:
    """What the pages under `root` should hold."""
    migrating = root / "docs" / "migrating.md"
    return {
        root / "docs" / "configuration.md": configuration_page(),
        migrating: with_differences(migrating.read_text(encoding="utf-8")),
    }


if __name__ == "__main__":
    for path, text in made_pages(Path.cwd()).items():
        path.write_text(text, encoding="utf-8")
