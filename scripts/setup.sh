#!/usr/bin/env bash
# Makes .venv from the complete pinned lock and checks what it installed. Safe to call again: quick when nothing changed,
# and an interrupted call is taken up where it stopped.
#   PYTHON=...            the Python to use (default: scripts/find_python.sh searches)
#   VIME_TORCH_INDEX=...  package index that holds PyTorch's CPU builds: torch comes from there, its CUDA packages are left out
set -euo pipefail
cd "$(dirname "$0")/.."

lock=requirements/cpu.txt
stamp=.venv/.vime-setup

fail() {
    echo "setup: $1" >&2
    exit 1
}

# What the environment was made from; the stamp holds it once everything is in place and imports.
key=$( (cat "$lock" scripts/setup.sh scripts/check_install.py pyproject.toml; echo "${VIME_TORCH_INDEX:-}") | sha256sum)
minor='import sys, pip; print("%d.%d" % sys.version_info[:2])'
if [ -n "${PYTHON:-}" ] && has=$(.venv/bin/python -c "$minor" 2>/dev/null); then
    wanted=$("$(bash scripts/find_python.sh)" -c "$minor")
    [ "$has" = "$wanted" ] || fail ".venv was made with Python $has, PYTHON=$PYTHON is $wanted. Remove it first: rm -r .venv"
fi
if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && [ -x .venv/bin/python ]; then
    exit 0
fi

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] ||
    fail "the lock is for Linux on x86_64, this is $(uname -s) on $(uname -m). docs/install.md says what else is possible."
command -v "${CC:-cc}" >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || command -v clang >/dev/null 2>&1 ||
    fail "no C compiler (cc, gcc or clang) was found; torch compiles kernels at run time. Install one, e.g.: apt-get install gcc g++"

# free_mib FOLDER: free space of the file system that holds it.
free_mib() { df -Pm "$1" | awk 'NR == 2 { print $4 }'; }

# Installed: 6.8 GiB with PyPI's torch (CUDA packages included), about 2.5 GiB with the CPU build. pip unpacks wheels in TMPDIR.
if [ -n "${VIME_TORCH_INDEX:-}" ]; then need=4000 need_tmp=1000; else need=9000 need_tmp=3000; fi
if [ ! -x .venv/bin/python ] || [ ! -d .venv/lib/python3*/site-packages/torch ]; then
    have=$(free_mib .)
    [ "$have" -ge "$need" ] || fail "$PWD has $have MiB free, the installation needs $need MiB. Free some, or clone to a larger disk."
    have=$(free_mib "${TMPDIR:-/tmp}")
    [ "$have" -ge "$need_tmp" ] ||
        fail "${TMPDIR:-/tmp} has $have MiB free, pip needs $need_tmp MiB for unpacking. Set TMPDIR to a folder on a larger disk."
fi

rm -f "$stamp"
if ! .venv/bin/python -c 'import sys, pip; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' 2>/dev/null; then
    python=$(bash scripts/find_python.sh)
    echo "setup: making .venv with $python ($("$python" -V 2>&1))"
    "$python" -m venv --clear .venv || fail "$python could not make a virtual environment (its message is above)."
fi

# --no-deps: the lock is complete, the resolver would take minutes and could only disagree with it.
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
install="install --quiet --quiet --no-deps"
echo "setup: installing $(grep -c == "$lock") pinned packages from $lock (about two minutes with a good connection)"
if [ -n "${VIME_TORCH_INDEX:-}" ]; then
    rest=$(mktemp)
    trap 'rm -f "$rest"' EXIT
    grep -vE '^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)==' "$lock" >"$rest"
    torch=$(grep -E '^torch==' "$lock")
    pip $install --index-url "$VIME_TORCH_INDEX" "$torch" ||
        fail "$torch could not be had from VIME_TORCH_INDEX. Check that it names PyTorch's CPU wheel index, or unset it."
    pip $install -r "$rest" || fail "pip failed (its message is above). Run make again: what is installed is kept."
else
    pip $install -r "$lock" || fail "pip failed (its message is above). Run make again: what is installed is kept."
fi
pip $install --no-build-isolation --editable . || fail "the project itself could not be installed (pip's message is above)."

.venv/bin/python scripts/check_install.py || fail "what was installed does not work (see above). Remove .venv and run make setup again."
echo "$key" >"$stamp"
