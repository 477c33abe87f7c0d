"""`vime doctor`: looks at packages and machine, tests what is installed with the framework's real parts, names cures."""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vime.doctor.findings import Finding, State, as_json, as_text, is_well, verdict, wrong
from vime.doctor.machine import check_gpu, check_machine, read_gpus
from vime.doctor.matrix import MATRIX
from vime.doctor.packages import check_package, check_pair, check_python
from vime.doctor.selftest import MODEL, PART, PLAN, WITHOUT_ENGINE, Planned, SelfTest, agreement, skip_hopeless

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Exit code 0 when nothing is wrong, else 1."""
    parser = argparse.ArgumentParser(
        prog="vime doctor",
        allow_abbrev=False,
        description="Look at the machine and the packages, test them with the framework's real parts (about 30 s), name cures.",
    )
    parser.add_argument("--quick", action="store_true", help="leave out the engine, the router, and engine against trainer")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(list(argv))
    begun = time.monotonic()
    if not options.json:
        print("vime doctor: looking at packages and machine, testing them side by side ...", file=sys.stderr, flush=True)
    findings = examine(quick=options.quick)
    seconds = time.monotonic() - begun
    if options.json:
        print(as_json(findings, seconds))
    else:
        print("\n".join(as_text(findings)).lstrip("\n"))
        print(f"\nvime doctor: {verdict(findings, seconds)}")
    return 0 if is_well(findings) else 1


def examine(*, quick: bool) -> list[Finding]:
    """All findings: packages, GPU, machine, self-test."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="vime-doctor-"))
    except OSError as error:
        packages, torch = check_packages({}, [check_package(package) for package in MATRIX])
        tests = [wrong(PART, "temporary folder", str(error), expected="that one can be made", cure="set TMPDIR to a folder with room")]
    else:
        packages, torch, tests = examine_in(folder, WITHOUT_ENGINE if quick else PLAN)
        if is_well(tests):  # else its logs are what the cures point at
            shutil.rmtree(folder, ignore_errors=True)
    return [*packages, *check_gpu(*read_gpus(), torch), *check_machine(), *tests]


def examine_in(folder: Path, parts: Sequence[Planned]) -> tuple[list[Finding], dict[str, object], list[Finding]]:
    """(packages, what the import of torch told, self-test), with the self-test's files in `folder`."""
    test = SelfTest(folder)
    try:
        results = {MODEL: test.run(MODEL)}
        used = frozenset().union(*(part.needs for part in parts)) - {"torch"}  # torch is asked for its devices
        beside = [package for package in MATRIX if package.name not in used]
        tested, checked = test.side_by_side(parts, [functools.partial(check_package, package) for package in beside])
    finally:
        test.close()
    results |= dict(zip(parts, tested, strict=True))
    packages, torch = check_packages(results, checked)
    tests = skip_hopeless(results, [finding.name for finding in packages if finding.state is State.WRONG])
    apart = agreement(folder)
    return packages, torch, tests if apart is None else [*tests, apart]


def check_packages(
    results: Mapping[Planned, list[Finding]], checked: Sequence[tuple[Finding, dict[str, object]]]
) -> tuple[list[Finding], dict[str, object]]:
    """All packages in the order of the matrix, and what the import of torch told.

    Those that are not in `checked` are used by parts of the self-test: they are imported by themselves only when no part
    that uses them went well.
    """
    facts = {finding.name: (finding, told) for finding, told in checked}
    proven = frozenset().union(*(part.needs for part, findings in results.items() if is_well(findings)))
    for package in MATRIX:
        if package.name not in facts:
            facts[package.name] = check_package(package, imports=package.name not in proven)
    return [check_python(), *(facts[package.name][0] for package in MATRIX), *check_pair()], facts["torch"][1]
