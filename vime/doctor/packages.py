"""Packages against the matrix: each is imported in a process of its own, so that one that is broken breaks nothing else."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping

from vime.doctor.findings import Finding, ok, warning, wrong
from vime.doctor.matrix import MATRIX, PAIRS, PYTHON, Package, numbers

__all__ = ["PART", "check_package", "check_pair", "check_python", "python_command"]

PART = "packages"
DEADLINE = 180.0  # seconds for one import: the first one of torch on a cold disk takes long
_MARK = "VIME-DOCTOR "
_CODE = f"""
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
facts = {{"file": str(getattr(module, "__file__", "")), "version": str(getattr(module, "__version__", ""))}}
if sys.argv[1] == "torch":
    facts["cuda"] = str(module.version.cuda)
    facts["devices"] = [module.cuda.get_device_name(i) for i in range(module.cuda.device_count())]
    facts["gloo"] = module.distributed.is_gloo_available()
    facts["nccl"] = ".".join(map(str, module.cuda.nccl.version())) if module.cuda.is_available() else ""
print({_MARK!r} + json.dumps(facts))
"""


def python_command() -> str:
    """How a user calls this Python."""
    return shlex.quote(sys.executable)


def check_python() -> Finding:
    """The interpreter itself."""
    version = platform.python_version()
    if PYTHON.holds(version):
        return ok(PART, "Python", f"{version} at {sys.executable}")
    cure = "make setup PYTHON=python3.12 (docs/install.md says how to get one)"
    return wrong(PART, "Python", f"{version} at {sys.executable}", expected=str(PYTHON), cure=cure)


def check_package(package: Package, *, imports: bool = True, deadline: float = DEADLINE) -> tuple[Finding, dict[str, object]]:
    """Version and import of one package; also what the import told (for torch: devices, gloo, nccl).

    With `imports` False the version alone is looked at: a part of the self-test has imported the package.
    """
    expected = f"{package.supported}" + (f"; tested: {', '.join(package.tested)}" if package.tested else "")
    versions = _installed(package)
    if not versions:
        if not package.needed:
            return ok(PART, package.name, f"not installed: {package.why}"), {}
        return wrong(PART, package.name, "not installed", expected=expected, cure=_install(package)), {}
    facts, failure = _import(package.module, deadline) if imports else ({}, "")
    found = ", ".join(f"{version} ({name})" if name != package.name else version for name, version in versions.items())
    if failure:
        tell = wrong if package.needed else warning
        cure = f"{_install(package, next(iter(versions)))} --force-reinstall"
        return tell(PART, package.name, f"{found}: import {package.module} fails: {failure}", expected="that it imports", cure=cure), facts
    if len(versions) > 1:
        more = " and ".join(versions)
        cure = f"{python_command()} -m pip uninstall --yes {' '.join(versions)} && {_install(package)}"
        return wrong(PART, package.name, f"{found}: {more} overwrite each other", expected="one of them", cure=cure), facts
    ((name, version),) = versions.items()
    if not package.supported.holds(version):
        tell = wrong if package.needed else warning
        return tell(PART, package.name, found, expected=expected, cure=_install(package, name)), facts
    return ok(PART, package.name, found, expected=expected), facts


def check_pair(pairs: Mapping[str, str] = PAIRS) -> list[Finding]:
    """vLLM's kernels are compiled against one torch; another one fails late and obscurely."""
    by_name = {package.module: package for package in MATRIX}
    engine, torch = _installed(by_name["vllm"]), _installed(by_name["torch"])
    if len(engine) != 1 or not torch:
        return []
    version, have = next(iter(engine.values())), next(iter(torch.values()))
    want = pairs.get(".".join(map(str, numbers(version)[:2])))
    if want is None or numbers(have)[:2] == numbers(want):
        return []
    cure = f"{python_command()} -m pip install --no-deps 'torch=={want}.*'"
    return [wrong(PART, "vLLM and torch", f"vLLM {version} with torch {have}", expected=f"torch {want}", cure=cure)]


def _install(package: Package, distribution: str | None = None) -> str:
    return f"{python_command()} -m pip install --no-deps {package.pip(distribution)}"


def _installed(package: Package) -> dict[str, str]:
    """Distribution -> version, for those that are there."""
    found = {}
    for name in package.distributions:
        try:
            found[name] = importlib.metadata.metadata(name).get("Version") or "without a version"
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _import(module: str, deadline: float) -> tuple[dict[str, object], str]:
    """(what the import told, "") or ({}, why it failed)."""
    env = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"} | dict(os.environ)
    command = [sys.executable, "-W", "ignore", "-c", _CODE, module]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=deadline, check=False)
    except subprocess.TimeoutExpired:
        return {}, f"not done after {deadline:g} s"
    except OSError as error:
        return {}, str(error)
    told = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode == 0 and told:
        return dict(json.loads(told[-1].removeprefix(_MARK))), ""
    return {}, last_error(done.stderr, done.returncode)


def last_error(stderr: str, code: int) -> str:
    """The line of a process's stderr that says why it failed, at most 300 characters."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    ended = f"killed by signal {-code}" if code < 0 else f"exit {code}"
    return (errors or lines or [ended])[-1][:300]
