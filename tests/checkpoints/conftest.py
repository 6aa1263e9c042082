"""A run's folder of checkpoints, a folder as its bucket, and a run with mirrors to one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints.mirrored_run import Place

from refocused.bucket.directory import DirectoryBucket


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def bucket(tmp_path: Path) -> DirectoryBucket:
    (tmp_path / "bucket").mkdir()
    return DirectoryBucket(tmp_path / "bucket")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.end()
