"""`vime doctor`: looks at packages and machine, tests what is installed with the framework's real parts, names cures."""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import time
from collections.abc import Mapping, Sequence

from vime.doctor.findings import Finding, State, as_json, as_text, is_well, verdict
from vime.doctor.machine import check_gpu, check_machine, read_gpus
from vime.doctor.matrix import MATRIX, Package
from vime.doctor.packages import check_package, check_pair, check_python
from vime.doctor.selftest import MODEL, PLAN, WITHOUT_ENGINE, Planned, SelfTest, agreement, skip_hopeless

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
    test = SelfTest()
    keep = True
    try:
        results = {MODEL: test.run(MODEL)}
        parts = WITHOUT_ENGINE if quick else PLAN
        used = frozenset().union(*(part.needs for part in parts)) - {"torch"}  # torch is asked for its devices
        beside = [package for package in MATRIX if package.name not in used]
        tested, checked = test.side_by_side(parts, [functools.partial(check_package, package) for package in beside])
        results |= dict(zip(parts, tested, strict=True))
        facts = {package.name: result for package, result in zip(beside, checked, strict=True)}
        facts |= check_used([package for package in MATRIX if package.name in used], results)
        packages = [check_python(), *(facts[package.name][0] for package in MATRIX), *check_pair()]
        tests = skip_hopeless(results, [finding.name for finding in packages if finding.state is State.WRONG])
        apart = agreement(test.folder)
        tests += [apart] if apart is not None else []
        keep = not is_well(tests)
    finally:
        test.close()
        if not keep:  # its logs are what the cures point at
            shutil.rmtree(test.folder, ignore_errors=True)
    return [*packages, *check_gpu(*read_gpus(), facts["torch"][1]), *check_machine(), *tests]


def check_used(packages: Sequence[Package], results: Mapping[Planned, list[Finding]]) -> dict[str, tuple[Finding, dict[str, object]]]:
    """Packages that parts of the self-test use: each is imported by itself only when no part that uses it went well."""
    proven = frozenset().union(*(part.needs for part, findings in results.items() if is_well(findings)))
    return {package.name: check_package(package, imports=package.name not in proven) for package in packages}
