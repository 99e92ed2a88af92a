#!/usr/bin/env bash
# Device suite, order under load and copy bandwidth on a CUDA device, in at most 4 minutes. It runs in the Python that
# has torch with CUDA (PYTHON=..., else python3) and needs torch and pytest only. Result: out/cuda.json
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=src
exec timeout --kill-after=10 240 "${PYTHON:-python3}" scripts/test_cuda.py "$@"
