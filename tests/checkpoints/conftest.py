"""A run's checkpoints, one of them, a folder as their bucket, and a run with mirrors to one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints.mirrored_run import Place
from checkpoints.step_copies import RecordingBucket
from checkpoints.step_samples import make_step

from refocused.checkpoints.step.step_directory import StepDirectory


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def bucket(tmp_path: Path) -> RecordingBucket:
    (tmp_path / "bucket").mkdir()
    return RecordingBucket(tmp_path / "bucket")


@pytest.fixture
def step(tmp_path: Path) -> StepDirectory:
    return make_step(tmp_path / "checkpoints", 10)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.end()
