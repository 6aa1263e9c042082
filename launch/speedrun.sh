#!/usr/bin/env bash
# Sets up what is missing, then goes from raw text to a scored, exported model in one command:
# launch/speedrun.sh [--data ADDRESS] [--depth N | --budget USD] [--out DIR] [section.key=value ...]
# Without arguments: a demonstration, on text that this machine has. Run again, it continues.
set -euo pipefail
checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

"$checkout/launch/setup_environment.sh"
exec "$checkout/.venv/bin/python" -P -m refocused.commands.speedrun "$@"
