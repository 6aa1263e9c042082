#!/usr/bin/env bash
# Sets up what is missing, then runs every check: launch/test.sh [pytest arguments]
# Fast tests come first. With arguments only pytest runs, with those.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/setup_environment.sh --test
export PATH="$PWD/.venv/bin:$PATH"
if [ $# -gt 0 ]; then
    exec pytest "$@"
fi
ruff format --check .
ruff check .
mypy
lint-imports
pytest -n 2 --dist loadfile -m "not slow"
# Many of these wait more than they compute; tests/spread.py says which of them stay together.
pytest -n 2 --dist loadscope -m slow
