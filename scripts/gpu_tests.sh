#!/usr/bin/env bash
# The tests and figures that need a CUDA device: nothing of CI runs them. Give a Python that has torch with CUDA and the rest of the stack.
#   PYTHON=python3 bash scripts/gpu_tests.sh [OUT]        OUT: a folder for logs and results (benchmarks/results by default)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3} out=${1:-benchmarks/results} status=0
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
"$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || { echo "torch sees no CUDA device here."; exit 2; }
mkdir -p "$out"
"$python" -m pytest -m gpu tests/gpu -q -p no:cacheprovider || status=$?
"$python" -m benchmarks.gpu_step --shape 0.6b --budget 16384 --out "$out/gpu_step_0.6b.json" || status=$?
"$python" -m benchmarks.gpu_step --shape 4b --budget 8192 --out "$out/gpu_step_4b.json" || status=$?
"$python" -m benchmarks.gpu_sync --shape 4b --out "$out/gpu_sync_4b.json" || status=$?
exit "$status"
