"""Fixtures for the tests of commands."""

from pathlib import Path

import pytest
from commands.run_samples import SampleRun


@pytest.fixture
def sample_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> SampleRun:
    """An empty run that commands find without being told, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    run = SampleRun(Path("runs") / "one", tmp_path / "bucket", capsys)
    run.checkpoints.mkdir(parents=True)
    return run
