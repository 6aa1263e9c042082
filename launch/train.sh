#!/usr/bin/env bash
# Sets up what is missing, then trains: launch/train.sh [--config FILE] [section.key=value ...]
# One rank a GPU (CUDA_VISIBLE_DEVICES chooses which), or two on a machine without any; RANKS=N takes
# the first N. Without --config it trains the demonstration of config/runs/demo.yaml. Run again, it
# resumes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/setup_environment.sh
if [ -z "${RANKS:-}" ]; then
    gpus="$( (nvidia-smi --list-gpus 2>/dev/null || true) | grep -c '^GPU' || true)"
    if [ "$gpus" -eq 0 ]; then
        RANKS=2
        export DS_ACCELERATOR=cpu # or DeepSpeed searches for a GPU in every process, with warnings
    elif [ -z "${CUDA_VISIBLE_DEVICES:-}" ]; then
        RANKS="$gpus"
    fi
fi
# Told a number, DeepSpeed takes the first GPUs, whatever CUDA_VISIBLE_DEVICES says.
ranks=()
[ -n "${RANKS:-}" ] && ranks=(--num_gpus "$RANKS")
# A port of its own, so that two runs on one machine do not meet.
port="$(.venv/bin/python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')"
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"
# Ctrl+C is for the ranks, which save and stop; the deepspeed command would only print a traceback.
trap '' INT
exec .venv/bin/deepspeed ${ranks[@]+"${ranks[@]}"} --master_port "$port" --log_level error launch/train.py "$@"
