#!/usr/bin/env bash
# Sets up what is missing, then trains: launch/train.sh [--config FILE] [section.key=value ...]
# One rank a GPU (CUDA_VISIBLE_DEVICES chooses which), or two on the CPU; RANKS=N takes
# the first N. Without --config it trains the demonstration of config/runs/demo.yaml. Run again, it
# resumes. --grace SECONDS, --spot, --restarts N and --monitor are for its supervisor: see --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/setup_environment.sh
exec .venv/bin/python -P -m refocused.commands.launch "$@"
