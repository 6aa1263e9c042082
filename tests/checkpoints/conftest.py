"""A run's folder of checkpoints, and a folder as its bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from refocused.bucket.directory import DirectoryBucket


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def bucket(tmp_path: Path) -> DirectoryBucket:
    (tmp_path / "bucket").mkdir()
    return DirectoryBucket(tmp_path / "bucket")
