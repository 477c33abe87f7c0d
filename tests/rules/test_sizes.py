"""Sizes and shapes of files, functions, packages and tests."""

from __future__ import annotations

import ast

from tests.rules.source import ROOT, parsed, python_files, relative

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
FOLDERS = ("vime", "tests", "examples", "scripts", "benchmarks")


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions of a file, methods and nested ones too."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_files_are_at_most_600_lines() -> None:
    lines = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(*FOLDERS)}
    assert not {name: count for name, count in lines.items() if count > MAX_FILE_LINES}


def test_functions_are_at_most_80_lines() -> None:
    long = []
    for path in python_files(*FOLDERS):
        for function in functions(parsed(path)):
            assert function.end_lineno is not None
            length = function.end_lineno - function.lineno + 1
            if length > MAX_FUNCTION_LINES:
                long.append(f"{relative(path)}:{function.lineno} {function.name}: {length} lines")
    assert not long, "\n".join(long)


def test_each_module_says_what_it_is() -> None:
    silent = [relative(path) for path in python_files("vime", "examples", "scripts", "benchmarks") if not ast.get_docstring(parsed(path))]
    empty_packages = {
        relative(path) for path in python_files("vime", "examples", "benchmarks") if path.name == "__init__.py" and not parsed(path).body
    }
    assert not [name for name in silent if name not in empty_packages]


def test_functions_are_annotated() -> None:
    bare = []
    for path in python_files("vime", "examples", "scripts", "benchmarks"):
        for function in functions(parsed(path)):
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            missing = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
            if missing or function.returns is None:
                bare.append(f"{relative(path)}:{function.lineno} {function.name}: {', '.join(missing) or 'return type'}")
    assert not bare, "\n".join(bare)


def test_package_files_hold_only_imports() -> None:
    wrong = []
    for path in python_files("vime"):
        if path.name != "__init__.py":
            continue
        for node in parsed(path).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            names = isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) and t.id.startswith("__") for t in node.targets)
            if not (docstring or names or isinstance(node, ast.Import | ast.ImportFrom)):
                wrong.append(f"{relative(path)}:{node.lineno}")
    assert not wrong, f"__init__.py holds a docstring, imports and __all__ only: {wrong}"


def test_tests_are_functions() -> None:
    classes = [
        f"{relative(path)}:{node.lineno} {node.name}"
        for path in python_files("tests")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test")
    ]
    assert not classes


def test_tests_do_not_sleep() -> None:
    sleeps = [
        f"{relative(path)}:{node.lineno}"
        for path in python_files("tests/unit", "tests/rules")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep"
    ]
    assert not sleeps


def test_unit_tests_mirror_the_package() -> None:
    homeless = []
    for path in python_files("tests/unit"):
        home = ROOT / "vime" / path.parent.relative_to(ROOT / "tests" / "unit")
        if path.name.startswith("test_") and not home.is_dir():
            homeless.append(relative(path))
    assert not homeless, f"tests/unit/PART/test_x.py tests vime/PART: {homeless}"
