"""Kill -9 at random moments of saves and uploads: no visible checkpoint is ever broken."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import Emulator, Fault

from refocused.checkpoints.step.checkpoint_directory import read_checkpoint, step_paths
from refocused.metrics.history import HISTORY

pytestmark = pytest.mark.slow


def report_of(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=250
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def steps_keep_the_losses(folder: str) -> bool:
    """Whether every remaining checkpoint has the end of the metrics."""
    steps = [read_checkpoint(path) for path in step_paths(Path(folder)).values()]
    return bool(steps) and all(HISTORY in step.manifest.files for step in steps)


def test_saving(tmp_path: Path) -> None:
    report = report_of("save_kills.py", str(tmp_path / "checkpoints"), "--kills", "100")
    assert report["kills"] == 100
    assert report["interrupted"] > 0  # some kills interrupted saves
    assert report["saved"] > 0
    assert (report["broken"], report["lost"]) == ([], [])
    assert steps_keep_the_losses(str(tmp_path / "checkpoints"))


def test_saving_on_two_machines_that_share_no_disk(tmp_path: Path) -> None:
    folders = [str(tmp_path / name / "checkpoints") for name in ("one", "other")]
    report = report_of("save_kills.py", *folders, "--kills", "40")
    assert report["interrupted"] > 0 and report["saved"] > 0
    assert (report["broken"], report["lost"]) == ([], [])
    assert all(map(steps_keep_the_losses, folders))


@pytest.mark.bucket
def test_uploading(tmp_path: Path, emulator: Emulator) -> None:
    emulator.proxy.script(lambda request: request.is_upload, Fault(lose_reply=True), times=3)
    report = report_of(
        "upload_kills.py", str(tmp_path / "run"), "--bucket", emulator.url, "--kills", "30"
    )
    assert report["kills"] == 30
    assert report["interrupted"] > 0  # some kills interrupted uploads
    assert report["broken"] == []
    assert report["committed"] == report["steps"] == 30
