#!/usr/bin/env bash
# Prints the path of a Python that the lock is made for (3.12 first, then 3.13), or says how to get one and exits 1.
# PYTHON=/path/to/python overrides the search.
set -euo pipefail

# suits CANDIDATE: it runs, its version is one of the lock's, and it can make virtual environments.
# A pyenv shim on PATH may exist and still not run, so each candidate is started.
suits() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
    if suits "$PYTHON"; then
        "$PYTHON" -c 'import sys; print(sys.executable)'
        exit 0
    fi
    found=$("$PYTHON" -c 'import platform; print("is Python " + platform.python_version())' 2>/dev/null) || found="does not run"
    echo "setup: PYTHON=$PYTHON $found; the lock is made for Python 3.12 (3.13 works too), with the venv and ensurepip modules." >&2
    echo "setup: point PYTHON at such a Python, or leave it unset and let the search find one." >&2
    exit 1
fi

candidates=(python3.12 python3.13 python3 python)
pyenv_root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "${HOME:-/nonexistent}/.pyenv")}
uv_root=${XDG_DATA_HOME:-${HOME:-/nonexistent}/.local/share}/uv/python
shopt -s nullglob
for version in 12 13; do
    candidates+=("$pyenv_root"/versions/3."$version".*/bin/python3 "$uv_root"/cpython-3."$version".*/bin/python3)
done

for candidate in "${candidates[@]}"; do
    if command -v "$candidate" >/dev/null 2>&1 && suits "$candidate"; then
        "$candidate" -c 'import sys; print(sys.executable)'
        exit 0
    fi
done

cat >&2 <<'END'
setup: no Python 3.12 or 3.13 with the venv module was found (on PATH, among pyenv's or uv's versions). Get one, then run make again:
  - distribution:  apt-get install python3.12 python3.12-venv     (or: dnf install python3.12)
  - pyenv:         pyenv install 3.12
  - uv:            uv python install 3.12
or name one you have: make setup PYTHON=/path/to/python3.12
END
exit 1
