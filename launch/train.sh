#!/usr/bin/env bash
# Sets up what is missing, then trains: launch/train.sh [--config FILE] [section.key=value ...]
# One rank a GPU (CUDA_VISIBLE_DEVICES chooses which), or two on the CPU; RANKS=N takes
# the first N. Without --config it trains the demonstration of config/runs/demo.yaml. Run again, it
# resumes. --grace SECONDS, --spot, --restarts N and --monitor are for its supervisor: see --help.
# Paths, and the folders runs and data, are those of the folder where it is typed.
set -euo pipefail
checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

"$checkout/launch/setup_environment.sh"
exec "$checkout/.venv/bin/python" -P -m refocused.commands.launch "$@"
