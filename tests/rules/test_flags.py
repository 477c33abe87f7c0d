"""The command line's surface: a new flag is a decision, so it fails here until it is entered in the list."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from tests.rules.source import ROOT
from vime.config import SECTIONS
from vime.config.fields import flag_specs

CONFIG = ROOT / "vime" / "config"
PLAN = ROOT / "vime" / "plan"  # reads what is not available yet, too: a plan is arithmetic
FLAG_LIST = ROOT / "tests" / "rules" / "flags.txt"


def all_flags() -> list[str]:
    """Every flag of every section."""
    return [spec.flag for section in SECTIONS.values() for spec in flag_specs(section)]


def test_the_flags_are_those_of_the_list() -> None:
    listed = FLAG_LIST.read_text(encoding="utf-8").split()
    assert listed == sorted(set(listed)), "keep flags.txt sorted, one flag a line"
    new, gone = sorted(set(all_flags()) - set(listed)), sorted(set(listed) - set(all_flags()))
    assert not new, f"new flags; if each is worth its place, enter them in tests/rules/flags.txt: {new}"
    assert not gone, f"flags.txt names flags that are gone: {gone}"


def test_each_flag_has_one_owner() -> None:
    assert not [flag for flag, count in Counter(all_flags()).items() if count > 1]


def test_each_field_name_is_unique_over_the_sections() -> None:
    """Hooks get one flat `args`: two sections may not hold the same name."""
    names = Counter(field.name for section in SECTIONS.values() for field in fields(section))
    assert not [name for name, count in names.items() if count > 1]


def test_each_field_has_one_line_of_documentation() -> None:
    wrong = []
    for name, section in SECTIONS.items():
        assert section.__doc__, f"{name} has no docstring"
        for field in fields(section):
            doc = field.metadata.get("doc", "")
            if len(doc) < 8 or "\n" in doc or not doc.endswith((".", ")", "?")):
                wrong.append(f"{name}.{field.name}: {doc!r}")
    assert not wrong, "\n".join(wrong)


def test_sections_are_frozen_and_keyword_only() -> None:
    for section in SECTIONS.values():
        parameters = section.__dataclass_params__  # type: ignore[attr-defined]
        assert parameters.frozen, f"{section.__name__} is not frozen"
        assert parameters.kw_only, f"{section.__name__} is not keyword-only"
        assert "__slots__" in vars(section), f"{section.__name__} has no slots"


def reads(tree: ast.AST) -> Iterator[str]:
    """Names that the code reads as attributes: x.name, getattr(x, "name")."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            yield from (arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_each_field_is_read_or_marked_not_yet() -> None:
    """Each field is read outside the configuration, by itself or through a property of RunConfig, or handed on to Megatron.

    One that is not carries `not_yet` and is refused when given; one that is carries no such mark.
    """
    sources = [path for path in (ROOT / "vime").rglob("*.py") if CONFIG not in path.parents and PLAN not in path.parents]
    read = {name for path in sources for name in reads(parsed(path))}
    properties = [node for node in ast.walk(parsed(CONFIG / "run.py")) if isinstance(node, ast.FunctionDef) and node.decorator_list]
    read |= {name for node in properties if node.name in read for name in reads(node)}
    specs = [spec for section in SECTIONS.values() for spec in flag_specs(section)]
    ignored = sorted({spec.name for spec in specs if spec.name not in read and spec.megatron is None and not spec.not_yet})
    assert not ignored, f"read nowhere: mark them not_yet=..., or take them out: {ignored}"
    marked = sorted({spec.name for spec in specs if spec.not_yet and (spec.name in read or spec.megatron)})
    assert not marked, f"read, but marked not_yet: take the mark away: {marked}"


def test_each_mark_says_what_to_do_instead() -> None:
    for spec in (spec for section in SECTIONS.values() for spec in flag_specs(section)):
        assert spec.not_yet is None or (len(spec.not_yet) > 20 and spec.not_yet.endswith(".")), f"{spec.flag}: {spec.not_yet!r}"
        assert set(spec.choices_not_yet) < set(spec.choices or ("",)), f"{spec.flag}: choices_not_yet are not some of its choices"
        assert not isinstance(spec.default, str) or spec.default not in spec.choices_not_yet, f"{spec.flag}: the default is not available"
