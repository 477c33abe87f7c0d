"""Users' functions: paths into slime become paths into vime where the function is there, and imports to be changed are found."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import vime
from vime.migrate.notes import Note
from vime.migrate.tables import FUNCTIONS

__all__ = ["defines", "imports_of", "new_path"]

_THEIRS = re.compile(r"(slime|vime|slime_plugins|vime_plugins)(\.\w+)+")
_IMPORT = re.compile(
    r"^\s*(?:from|import)\s+(?P<module>(?:slime|slime_plugins|sglang|vime_plugins|vime)(?:\.\w+)*)\b(?:\s+import\s+(?P<names>[\w, ]+))?"
)


def new_path(path: str) -> str | None:
    """The path here of a function of slime's or Vime's; None when there is no such function. Other paths are the user's own."""
    if not _THEIRS.fullmatch(path):
        return path
    ours = FUNCTIONS.get(path, re.sub(r"^slime\.", "vime.", path))
    module, _, name = ours.rpartition(".")
    return ours if defines(module, name) else None


def defines(module: str, name: str) -> bool:
    """Whether a module of ours defines or imports `name`, or is a package with a module of that name. Nothing is imported."""
    parts = module.split(".")
    if parts[0] != "vime":
        return False
    base = Path(vime.__file__).parent.joinpath(*parts[1:])
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not file.is_file():
        return False
    if (base / f"{name}.py").is_file():
        return True
    return any(name in names for names in map(_names, ast.parse(file.read_text(encoding="utf-8")).body))


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name) for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [node.target.id] if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else []


def imports_of(path: str, folders: Sequence[Path]) -> Iterator[Note]:
    """What must change in the module of a user's function (`package.module.name`), when its file is found in one of `folders`."""
    module = path.rpartition(".")[0].replace(".", "/")
    file = next((file for folder in folders if (file := folder / f"{module}.py").is_file()), None)
    if not module or file is None:
        return
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        match = _IMPORT.match(line)
        if match is None:
            continue
        module, names = match["module"], [name.split()[0] for name in (match["names"] or "").split(",") if name.strip()]
        ours = re.sub(r"^slime\b", "vime", module)
        if ours.startswith("vime.") and names and all(_there(module, ours, name) for name in names):
            if ours == module and not any(f"{module}.{name}" in FUNCTIONS for name in names):
                continue
            changed = sorted({FUNCTIONS.get(f"{module}.{name}", f"{ours}.{name}").rpartition(".")[0] for name in names})
            why = f"import from {' and '.join(changed)} instead."
        else:
            why = "there is no such module, or not with these names: see docs/hooks.md for what hooks can use."
        yield Note(kind="could not", place=f"{file} line {number}", what=line.strip(), why=why)


def _there(module: str, ours: str, name: str) -> bool:
    target = FUNCTIONS.get(f"{module}.{name}", f"{ours}.{name}")
    return defines(*target.rpartition(".")[::2])
