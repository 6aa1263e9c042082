from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "train.sh"


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_script_sets_up_and_hands_all_its_arguments_to_the_supervisor(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    shutil.copy(SCRIPT, tmp_path / "launch")
    program(tmp_path / "launch" / "setup_environment.sh", "echo set up")
    program(tmp_path / ".venv" / "bin" / "python", 'pwd; printf "%s\\n" "$@"; exit 5')
    done = subprocess.run(
        [str(tmp_path / "launch" / "train.sh"), "--restarts", "3", "--config", "a b"],
        cwd="/",
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == [
        "set up",
        str(tmp_path),
        *("-P", "-m", "refocused.commands.launch"),
        *("--restarts", "3", "--config", "a b"),
    ]
    assert done.returncode == 5
