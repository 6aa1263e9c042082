#!/usr/bin/env bash
# Prepares a fresh machine: .venv with the pinned packages and this one, and the folders runs and data.
# Safe to run twice: the second time does nothing. Nothing outside this folder is changed unasked.
#   launch/setup_environment.sh [--test] [--screen]
# --test adds what the tests need. --screen also installs screen by apt-get, where it is missing:
# `train.sh --monitor` opens it. PYTHON chooses the interpreter (default: python3), 3.11 or newer.
# uv installs the packages where it is found, pip otherwise.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra=""
screen=""
for option in "$@"; do
    case "$option" in
        --test) extra="[test]" ;;
        --screen) screen=yes ;;
        --help | -h)
            sed -n '2,7s/^# \{0,1\}//p' launch/setup_environment.sh
            exit 0
            ;;
        *)
            echo "setup: $option is no option of setup_environment.sh. There are --test, --screen and --help." >&2
            exit 2
            ;;
    esac
done

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

if [ -n "$screen" ] && ! command -v screen >/dev/null; then
    apt=(apt-get)
    [ "$(id -u)" = 0 ] || apt=(sudo apt-get)
    if ! command -v "${apt[0]}" >/dev/null; then
        echo "setup: --screen needs ${apt[0]}, which is not here. Install screen as this system does it." >&2
        exit 2
    fi
    echo "setup: installing screen (apt-get)" >&2
    quietly "${apt[@]}" update
    quietly "${apt[@]}" install --yes --no-install-recommends screen
fi

python="${PYTHON:-python3}"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "setup: $python is not Python 3.11 or newer. Install one, or set PYTHON=/path/to/python3." >&2
    exit 2
fi
uv=""
if uv --version >/dev/null 2>&1; then uv=yes; fi
if [ -z "$uv" ] && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "setup: $python cannot make virtual environments. On Debian or Ubuntu: apt-get install python3-venv." >&2
    exit 2
fi

mkdir -p runs data
stamp=".venv/.installed$extra"
version="$("$python" --version)"
wanted="$(cat requirements_training.txt pyproject.toml | cksum) $version"
for installed in "$stamp" ".venv/.installed[test]"; do # the tests need all that training does
    if [ -f "$installed" ] && [ "$(cat "$installed")" = "$wanted" ]; then
        exit 0
    fi
done

began=$SECONDS
echo "setup: installing into .venv (a few minutes the first time)" >&2
if ! .venv/bin/python -m pip --version >/dev/null 2>&1 ||
    [[ "$(.venv/bin/python --version)" != "${version%.*}".* ]]; then
    # There is none, its installation was interrupted, or it is of another Python.
    if [ -n "$uv" ]; then
        quietly uv venv --quiet --clear --seed --python \
            "$("$python" -c 'import sys; print(sys.executable)')" .venv
    else
        "$python" -m venv --clear .venv
    fi
fi
pip=(.venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check)
install=("${pip[@]}")
[ -z "$uv" ] || install=(uv pip install --quiet --python .venv/bin/python)
# torch always by pip: the build, for CPU or CUDA, is often chosen in pip's configuration (its index
# or find-links), which uv does not read.
quietly "${pip[@]}" "$(grep '^torch==' requirements_training.txt)"
quietly "${install[@]}" -r requirements_training.txt
quietly "${install[@]}" --editable ".$extra"
# Compile on all cores; pip would use one. Files for other Python versions fail.
.venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
echo "$wanted" >"$stamp"
command -v screen >/dev/null ||
    echo "setup: screen, which train.sh --monitor opens, is not here; --screen installs it" >&2
echo "setup: done in $((SECONDS - began)) s" >&2
