#!/usr/bin/env bash
# Every part of the tests; runs them all and fails if one failed. Arguments are the first part's.
set -uo pipefail
cd "$(dirname "$0")/.."
trap 'exit 130' INT
failed=()
run() {
    echo "== $1"
    "${@:2}" || failed+=("$1")
}
run tests .venv/bin/python -m pytest "$@"
run rbln .venv/bin/python -m pytest tests/rbln -m "rbln and not slow" -q
run contract scripts/contract.sh
if ((${#failed[@]})); then
    echo "tests failed: ${failed[*]}" >&2
    exit 1
fi
