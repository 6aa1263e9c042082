#!/usr/bin/env bash
# Sets up what is missing, then runs what a change needs: launch/test.sh [pytest arguments]
# ruff, mypy, import-linter and the fast tests, among them a real run that is killed, resumed and
# exported. With arguments only pytest runs, with those.
#   launch/test.sh --all
# runs the slow tests as well, as CI does: real ranks, launchers, stores and outages.
#   launch/test.sh --long [pytest arguments]
# runs what takes too long for every change: kills and faults by the dozen, clusters on this machine.
#   launch/test.sh --lowest [pytest arguments]
# runs the fast tests with the lowest versions that pyproject.toml allows, in an environment of
# their own that is removed again. torch stays as it is installed.
#   launch/test.sh --null-gpu [WORDS]
# walks the paths of a GPU without one, with torch's CUDA build at the lowest and the pinned version:
# 5 GB each, kept in .null_gpu (or NULL_GPU_FOLDER). WORDS choose walks, and versions of torch. Needs
# gcc and the package index; exits with 77, and the reason, where an environment cannot be had.
set -euo pipefail
typed_in="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
arguments=()
for argument in "$@"; do # paths are those of the folder where they are typed
    [[ "$argument" != */* && "$argument" != *.py* || ! -e "$typed_in/${argument%%::*}" ]] ||
        argument="$typed_in/$argument"
    arguments+=("$argument")
done
set -- "${arguments[@]}"

launch/setup_environment.sh --test
export PATH="$PWD/.venv/bin:$PATH"

site_packages() {
    "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

if [ "${1:-}" = --lowest ]; then
    shift
    lowest="$(mktemp -d)"
    trap 'rm -rf "$lowest"' EXIT
    .venv/bin/python -m venv "$lowest"
    echo "import site; site.addsitedir('$(site_packages .venv/bin/python)')" \
        >"$(site_packages "$lowest/bin/python")/installed.pth"
    "$lowest/bin/python" - >"$lowest/requirements.txt" <<'END'
import re, tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
names = ("tensorboard", "wandb", "pictures", "parquet")
wanted = project["dependencies"] + [one for name in names for one in extras[name]]
for name, version in (re.match(r"([\w.-]+)>=([\d.]+)", one).groups() for one in wanted):
    if name != "torch":
        print(f"{name}=={version}")
END
    "$lowest/bin/python" -m pip install --quiet --disable-pip-version-check \
        -r "$lowest/requirements.txt"
    export PATH="$lowest/bin:$PATH"
    python -m pytest -n 2 --dist loadfile -m "not slow and not long" "$@"
    exit
fi
if [ "${1:-}" = --long ]; then
    shift
    exec pytest -n 2 --dist loadscope -m long "$@"
fi
if [ "${1:-}" = --null-gpu ]; then
    shift
    exec .venv/bin/python tests/null_gpu/walks.py "$@"
fi
if [ $# -gt 0 ] && [ "$1" != --all ]; then
    exec pytest "$@"
fi
ruff format --check .
ruff check .
mypy
lint-imports
pytest -n 2 --dist loadfile -m "not slow and not long"
[ "${1:-}" = --all ] || exit 0
# Many of these wait more than they compute; tests/spread.py says which of them stay together.
pytest -n 2 --dist loadscope -m "slow and not long"
