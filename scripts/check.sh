#!/usr/bin/env bash
# Every static check; runs them all and fails if one failed.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
failed=()
run() {
    echo "== $1"
    "${@:2}" || failed+=("$1")
}
run ruff "$bin/ruff" check .
run format "$bin/ruff" format --check .
run mypy "$bin/mypy"
run imports "$bin/lint-imports" --no-logo
run names "$bin/python" scripts/check_names.py
run sizes "$bin/python" scripts/sizes.py
if ((${#failed[@]})); then
    echo "check failed: ${failed[*]}" >&2
    exit 1
fi
echo "check passed"
