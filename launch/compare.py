#!/usr/bin/env python3
"""Compares runs: `./launch/compare.py runs/one runs/two`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # The folder of a script comes first on the path, where its neighbours would hide packages.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from refocused.commands.main import run_script

    run_script("compare")
