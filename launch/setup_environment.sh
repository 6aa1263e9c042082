#!/usr/bin/env bash
# Makes .venv with the pinned packages and this one. Safe to run twice: the second time does nothing.
#   launch/setup_environment.sh [--test]     --test adds what the tests need
# PYTHON chooses the interpreter (default: python3); it must be 3.11 or newer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra=""
[ "${1:-}" = "--test" ] && extra="[test]"
python="${PYTHON:-python3}"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "setup: $python is not Python 3.11 or newer. Install one, or set PYTHON=/path/to/python3." >&2
    exit 2
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "setup: $python cannot make virtual environments. On Debian or Ubuntu: apt-get install python3-venv." >&2
    exit 2
fi

stamp=".venv/.installed$extra"
wanted="$(cat requirements_training.txt pyproject.toml | cksum) $("$python" --version)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi

began=$SECONDS
echo "setup: installing into .venv (a few minutes the first time)" >&2
[ -x .venv/bin/python ] || "$python" -m venv .venv
install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
quietly() { # pip's warnings about its own configuration would hide the errors
    local log
    log="$(mktemp)"
    if ! "$@" >"$log" 2>&1; then
        cat "$log" >&2
        rm -f "$log"
        echo "setup: failed: $*" >&2
        exit 1
    fi
    rm -f "$log"
}
quietly "${install[@]}" "$(grep '^torch==' requirements_training.txt)"
quietly "${install[@]}" -r requirements_training.txt
quietly "${install[@]}" --editable ".$extra"
echo "$wanted" >"$stamp"
echo "setup: done in $((SECONDS - began)) s" >&2
