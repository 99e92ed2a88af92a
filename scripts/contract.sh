#!/usr/bin/env bash
# The contract subset on the oldest and the newest vLLM served, in the environments that `scripts/env.py contract` makes.
set -euo pipefail
cd "$(dirname "$0")/.."
run() {
    local version=$1 python=$2
    shift 2
    "$python" -c "import vllm; assert vllm.__version__.split('+')[0] == '$version', vllm.__version__"
    "$python" -m pytest tests/engine_contract tests/device/test_vllm_layouts.py -m "contract and not slow" "$@"
}
run 0.30.0 .venv-vllm030/bin/python "$@"
run 0.33.0 .venv-vllm033/bin/python "$@"
