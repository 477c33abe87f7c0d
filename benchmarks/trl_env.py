"""TRL's own environment: a virtual environment that holds TRL and what only TRL needs, on top of the project's packages.

torch and transformers are those of the project, so both sides compute with the same libraries and nothing large is fetched.
"""

from __future__ import annotations

import hashlib
import site
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.workload import ROOT, RUNS

__all__ = ["make_environment"]

PINS = ROOT / "benchmarks" / "trl.txt"


def make_environment(folder: Path = RUNS / "venv") -> Path:
    """Make the environment when it is not there; returns its Python. Raises CalledProcessError when the installation fails."""
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    key = hashlib.sha256(PINS.read_bytes() + sys.prefix.encode()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == key:
        return python
    print(f"installing TRL ({PINS.relative_to(ROOT)}) into {folder.relative_to(ROOT)}", file=sys.stderr)
    venv.create(folder, clear=True, with_pip=False)
    # pip of the project installs into the other environment, before that one can see the project's packages.
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "-r", str(PINS)]
    subprocess.run([*command, "--disable-pip-version-check"], check=True, stdout=sys.stderr)
    own = next((folder / "lib").glob("python3.*")) / "site-packages"
    shared = site.getsitepackages()[0]
    (own / "project.pth").write_text(f"import site; site.addsitedir({shared!r})\n", encoding="utf-8")
    stamp.write_text(key, encoding="utf-8")
    return python
