#!/usr/bin/env bash
# Resolves requirements/cpu.in (with overrides.txt) into the complete pinned lock requirements/cpu.txt, with uv.
# Review the difference before you commit it; `make setup` then brings .venv in line.
set -euo pipefail
cd "$(dirname "$0")/../requirements"

if command -v uv >/dev/null 2>&1; then
    uv=(uv)
else
    python=$(bash ../scripts/find_python.sh)
    tools=$(mktemp -d)
    trap 'rm -rf "$tools"' EXIT
    "$python" -m venv "$tools"
    "$tools/bin/python" -m pip --disable-pip-version-check install --quiet uv
    uv=("$tools/bin/uv")
fi
"${uv[@]}" pip compile --quiet --no-header --python-version 3.12 --python-platform x86_64-manylinux_2_28 \
    --override overrides.txt --output-file cpu.txt "$@" cpu.in
echo "lock: requirements/cpu.txt pins $(grep -c == cpu.txt) packages"
