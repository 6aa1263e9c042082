from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "train.sh"


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def started(folder: Path, *argv: str, gpus: int, **environment: str) -> list[str]:
    """What the script gives to `deepspeed`, on a machine with so many GPUs."""
    (folder / "launch").mkdir()
    shutil.copy(SCRIPT, folder / "launch")
    program(folder / "launch" / "setup_environment.sh", "exit 0")
    program(folder / ".venv" / "bin" / "python", "echo 12345")
    program(folder / ".venv" / "bin" / "deepspeed", 'printf "%s\\n" "${DS_ACCELERATOR:--}" "$@"')
    lines = "".join(f"echo 'GPU {number}: NVIDIA H100'\n" for number in range(gpus))
    program(folder / "bin" / "nvidia-smi", f"{lines}exit 0")
    known = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [str(folder / "launch" / "train.sh"), *argv],
        env=known | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("gpus", "environment", "expected"),
    [
        (8, {}, ["-", "--num_gpus", "8"]),
        (8, {"RANKS": "4"}, ["-", "--num_gpus", "4"]),
        (8, {"CUDA_VISIBLE_DEVICES": "4,5"}, ["-"]),
        (8, {"RANKS": "2", "CUDA_VISIBLE_DEVICES": "4,5"}, ["-", "--num_gpus", "2"]),
        (0, {}, ["cpu", "--num_gpus", "2"]),
        (0, {"CUDA_VISIBLE_DEVICES": "0"}, ["cpu", "--num_gpus", "2"]),
    ],
)
def test_there_is_a_rank_for_each_gpu_that_may_be_used(
    tmp_path: Path, gpus: int, environment: dict[str, str], expected: list[str]
) -> None:
    given = started(tmp_path, "--config", "a b", gpus=gpus, **environment)
    assert given[: given.index("--master_port")] == expected
    assert given[-3:] == ["launch/train.py", "--config", "a b"]
