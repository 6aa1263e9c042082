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
# Files share the cores, except where several ranks, signals and time limits are the subject.
pytest -n 2 --dist loadfile -m "not slow"
alone=(tests/checkpoints tests/commands tests/end_to_end)
pytest -n 2 --dist loadfile -m slow "${alone[@]/#/--ignore=}"
pytest -m slow "${alone[@]}"
