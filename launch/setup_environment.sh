#!/usr/bin/env bash
# Prepares a fresh machine: .venv with the pinned packages and this one, and the folders runs and data.
# Safe to run twice: the second time does nothing. Nothing outside this folder is changed unasked.
#   launch/setup_environment.sh [--test] [--screen]
# --test adds what the tests need. --screen also installs screen by apt-get, where it is missing:
# `train.sh --monitor` opens it. PYTHON chooses the interpreter (default: python3), 3.11 or newer.
# uv installs the packages where it is found, pip otherwise.
set -euo pipefail
typed_in="$PWD"
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

install() { # WHAT COMMAND...: show the larger downloads and when unpacking begins; all if it fails
    local log
    echo "setup: $((SECONDS - began)) s  $1" >&2
    shift
    log="$(mktemp)"
    # pip: "  Downloading [URL/]NAME (1.5 GB)", or "Using cached"; uv: "Downloading NAME (1.5GiB)".
    if ! "$@" 2>&1 | tee "$log" | sed -u -n >&2 \
        -e 's/\(-[^- ]*\)\{3\}\.whl / /' \
        -e 's/^ *Downloading \([^ ]*\/\)\{0,1\}\([^ ]*\) (\([0-9.]* \{0,1\}[MG]i\{0,1\}B\)).*/setup:       \2, \3/p' \
        -e 's/^ *Using cached \([^ ]*\) (\([0-9.]* [MG]B\)).*/setup:       \1, \2, downloaded before/p' \
        -e 's/^Installing collected packages:.*/setup:       unpacking/p'; then
        cat "$log" >&2
        rm -f "$log"
        echo "setup: failed: $*" >&2
        exit 1
    fi
    rm -f "$log"
}

began=$SECONDS
if [ -n "$screen" ] && ! command -v screen >/dev/null; then
    apt=(apt-get)
    [ "$(id -u)" = 0 ] || apt=(sudo apt-get)
    if ! command -v "${apt[0]}" >/dev/null; then
        echo "setup: --screen needs ${apt[0]}, which is not here. Install screen as this system does it." >&2
        exit 2
    fi
    install "the lists of apt-get" "${apt[@]}" update
    install "screen, by apt-get" "${apt[@]}" install --yes --no-install-recommends screen
fi

python="${PYTHON:-python3}"
[[ "$python" != [!/]*/* ]] || python="$typed_in/$python"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "setup: $python is not Python 3.11 or newer. Install one, or set PYTHON=/path/to/python3." >&2
    exit 2
fi
uv=""
if uv --version >/dev/null 2>&1; then uv=uv; fi
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

packages="$(($(grep -c '^[a-z].*==' requirements_training.txt) - 1)) packages and what they need"
echo "setup: installing into .venv, by ${uv:-pip}: torch, $packages. One to five minutes; 2 GB on the" >&2
echo "setup: disk with torch for the CPU, several more with torch for CUDA" >&2
if ! .venv/bin/python -m pip --version >/dev/null 2>&1 ||
    [[ "$(.venv/bin/python --version)" != "${version%.*}".* ]]; then
    # There is none, its installation was interrupted, or it is of another Python.
    if [ -n "$uv" ]; then
        install "a virtual environment" uv venv --clear --seed --python \
            "$("$python" -c 'import sys; print(sys.executable)')" .venv
    else
        install "a virtual environment" "$python" -m venv --clear .venv
    fi
fi
pip=(.venv/bin/python -m pip install --no-compile --disable-pip-version-check)
others=("${pip[@]}")
[ -z "$uv" ] || others=(uv pip install --python .venv/bin/python)
# torch always by pip: the build, for CPU or CUDA, is often chosen in pip's configuration (its index
# or find-links), which uv does not read.
torch="$(grep '^torch==' requirements_training.txt)"
install "$torch" "${pip[@]}" "$torch"
install "$packages" "${others[@]}" -r requirements_training.txt
install "refocused${extra:+ and what its tests need}" "${others[@]}" --editable ".$extra"
echo "setup: $((SECONDS - began)) s  compiling Python files" >&2
# Compile on all cores; pip would use one. Files for other Python versions fail.
.venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
echo "$wanted" >"$stamp"
command -v screen >/dev/null ||
    echo "setup: screen, which train.sh --monitor opens, is not here; --screen installs it" >&2
echo "setup: done in $((SECONDS - began)) s" >&2
