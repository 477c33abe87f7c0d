"""Imports what the lock installed and prints the versions; exits 1 naming what does not import.

The check goes by module, not by distribution: CPU builds of vLLM carry several distribution names.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import platform
import sys
import time
import warnings

from vime.doctor.matrix import MATRIX

MODULES = (*(package.module for package in MATRIX if package.tested), "vime")


def version_of(name: str) -> str:
    """The version of the distribution that provides the top-level package of `name`, e.g. "2.13.0"."""
    top = name.split(".", maxsplit=1)[0]
    distributions = importlib.metadata.packages_distributions().get(top) or [top]
    return importlib.metadata.version(distributions[0])


def main() -> int:
    """Import each module; 0 when all did."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    started, broken, shown = time.monotonic(), [], []
    for name in MODULES:
        try:
            importlib.import_module(name)
            shown.append(f"{name} {version_of(name)}")
        except Exception as error:  # noqa: BLE001 - whatever an import raises is what we report
            broken.append(f"{name}: {type(error).__name__}: {error}")
    print(f"setup: Python {platform.python_version()}; " + ", ".join(shown))
    for line in broken:
        print(f"setup: cannot import {line}", file=sys.stderr)
    if not broken:
        print(f"setup: all {len(MODULES)} modules import ({time.monotonic() - started:.0f} s).")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
