#!/usr/bin/env bash
# The contract subset on the oldest and the newest vLLM served, at the same time, in the environments that
# `scripts/env.py contract` makes. Each one's output is shown once it has ended.
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p out
trap 'kill $(jobs -p) 2>/dev/null; exit 130' INT TERM
declare -A started
run() {
    local version=$1 python=$2
    shift 2
    "$python" -c "import vllm; assert vllm.__version__.split('+')[0] == '$version', vllm.__version__" &&
        "$python" -m pytest tests/engine_contract tests/device/test_vllm_layouts.py \
            -m "contract and not slow" -p no:cacheprovider "$@"
}
for version in 0.30.0 0.33.0; do
    python=.venv-vllm${version//./}
    run "$version" "${python%0}/bin/python" "$@" >"out/contract-$version.log" 2>&1 &
    started[$version]=$!
done
failed=0
for version in 0.30.0 0.33.0; do
    wait "${started[$version]}" || failed=1
    echo "== vLLM $version"
    cat "out/contract-$version.log"
done
exit "$failed"
