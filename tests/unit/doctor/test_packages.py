"""Broken packages: fake ones on a path of their own, imported as the real ones are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vime.doctor.findings import State
from vime.doctor.matrix import MATRIX, Package, Range
from vime.doctor.packages import check_package, check_pair, check_python

BROKEN = "import ctypes\nctypes.CDLL('libnothere.so.13')\n"
BROKEN_WITH_NOISE = "import sys\nprint('a warning', file=sys.stderr)\nraise ImportError('undefined symbol: _ZN2at4zero')\n"
KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
HANGS = "import threading\nthreading.Event().wait()\n"
EXITS = "raise SystemExit(0)\n"


def install(folder: Path, name: str, version: str, code: str = "", module: str = "") -> None:
    """A distribution with one module."""
    (folder / f"{module or name}.py").write_text(code)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def package_of(name: str, *distributions: str, needed: bool = True) -> Package:
    return Package(
        name=name, module=name, distributions=distributions or (name,), supported=Range(low="1.0", below="2"),
        tested=("1.5",) * max(1, len(distributions)), why="a test", needed=needed,
    )  # fmt: skip


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on the path, here and in what is started."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    return tmp_path


def test_a_package_that_imports_is_well(site: Path) -> None:
    install(site, "fakewell", "1.5", "__version__ = '1.5'\nprint('chatter')\n")
    finding, facts = check_package(package_of("fakewell"))
    assert (finding.state, finding.found) == (State.OK, "1.5")
    assert facts["file"] == str(site / "fakewell.py")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (BROKEN, "libnothere.so.13: cannot open shared object"),
        (BROKEN_WITH_NOISE, "ImportError: undefined symbol"),
        (KILLED, "killed by signal 9"),
        (EXITS, "exit 0"),
    ],
    ids=["missing library", "missing symbol", "killed", "exits"],
)
def test_a_package_that_does_not_import_is_wrong_and_says_why(site: Path, code: str, why: str) -> None:
    install(site, "fakebroken", "1.5", code)
    finding, facts = check_package(package_of("fakebroken"))
    assert (finding.state, facts) == (State.WRONG, {})
    assert why in finding.found
    assert finding.cure.endswith("-m pip install --no-deps fakebroken==1.5 --force-reinstall")
    assert check_package(package_of("fakebroken", needed=False))[0].state is State.WARNING


def test_a_package_that_the_self_test_has_imported_is_not_imported_again(site: Path) -> None:
    install(site, "fakeused", "1.5", BROKEN)
    assert check_package(package_of("fakeused"), imports=False)[0].state is State.OK


def test_an_import_that_does_not_end_is_ended(site: Path) -> None:
    install(site, "fakehangs", "1.5", HANGS)
    finding, _ = check_package(package_of("fakehangs"), deadline=3.0)
    assert finding.state is State.WRONG
    assert "not done after 3 s" in finding.found


@pytest.mark.parametrize("version", ["0.9", "2.0"])
def test_a_version_outside_the_range_is_wrong_although_it_imports(site: Path, version: str) -> None:
    install(site, "fakeother", version)
    finding, _ = check_package(package_of("fakeother"))
    assert (finding.state, finding.found, finding.expected) == (State.WRONG, version, ">=1.0,<2; tested: 1.5")


def test_a_torn_installation_without_a_version_is_wrong(site: Path) -> None:
    install(site, "faketorn", "1.5")
    (site / "faketorn-1.5.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: faketorn\n")
    finding, _ = check_package(package_of("faketorn"))
    assert (finding.state, finding.found) == (State.WRONG, "without a version")


def test_a_package_that_is_missing() -> None:
    finding, _ = check_package(package_of("no-such-package"))
    assert (finding.state, finding.found) == (State.WRONG, "not installed")
    assert finding.cure.endswith("pip install --no-deps no-such-package==1.5")
    assert check_package(package_of("no-such-package", needed=False))[0].state is State.OK


def test_two_distributions_of_one_module_overwrite_each_other(site: Path) -> None:
    install(site, "faketwin", "1.5")
    install(site, "faketwin_cpu", "1.4", module="faketwin")
    finding, _ = check_package(package_of("faketwin", "faketwin_cpu", "faketwin"))
    assert finding.state is State.WRONG
    assert "overwrite each other" in finding.found
    assert "pip uninstall --yes faketwin_cpu faketwin && " in finding.cure


def test_either_distribution_will_do(site: Path) -> None:
    install(site, "fakeone_cpu", "1.4", module="fakeone")
    assert check_package(package_of("fakeone", "fakeone_cpu", "fakeone"))[0].found == "1.4 (fakeone_cpu)"


def test_a_torch_that_vllm_was_not_built_against_is_wrong() -> None:
    assert check_pair() == []
    (finding,) = check_pair({"0.32": "2.10"})
    assert finding.state is State.WRONG
    assert finding.cure.endswith("pip install --no-deps 'torch==2.10.*'")


def test_this_python_is_well() -> None:
    assert check_python().state is State.OK


def test_each_package_of_the_matrix_is_looked_at_by_name() -> None:
    assert len({package.name for package in MATRIX}) == len(MATRIX)
