#!/usr/bin/env bash
# Prints the first Python 3.11 to 3.13 of: $PYTHON, python3, python3.11, python3.12, python3.13.
set -euo pipefail
for candidate in ${PYTHON:-} python3 python3.11 python3.12 python3.13; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
        command -v "$candidate"
        exit 0
    fi
done
echo "error: kvstow needs Python 3.11, 3.12 or 3.13 with venv and pip (Debian: apt-get install python3-venv)." >&2
echo "       python3 here is: $(python3 --version 2>&1 || true). Name another one with: make PYTHON=/path/to/python ..." >&2
exit 1
