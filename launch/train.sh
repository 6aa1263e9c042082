#!/usr/bin/env bash
# Sets up what is missing, then trains: launch/train.sh [--config FILE] [section.key=value ...]
# One rank a GPU, or two on a machine without any; RANKS=N chooses. Without --config it trains the
# demonstration of config/runs/demo.yaml. Run again, it resumes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/setup_environment.sh
if [ -z "${RANKS:-}" ]; then
    RANKS="$( (nvidia-smi --list-gpus 2>/dev/null || true) | grep -c '^GPU' || true)"
    if [ "$RANKS" -eq 0 ]; then
        RANKS=2
        export DS_ACCELERATOR=cpu # or DeepSpeed searches for a GPU in every process, with warnings
    fi
fi
# A port of its own, so that two runs on one machine do not meet.
port="$(.venv/bin/python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')"
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"
# Ctrl+C is for the ranks, which save and stop; the deepspeed command would only print a traceback.
trap '' INT
exec .venv/bin/deepspeed --num_gpus "$RANKS" --master_port "$port" --log_level error launch/train.py "$@"
