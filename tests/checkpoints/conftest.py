"""Fixtures: a run's checkpoints, a folder as their bucket, and a run with mirrors."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints.faulty_bucket import FaultyBucket
from checkpoints.mirrored_run import Place
from checkpoints.step_samples import PREFIX, make_step

from refocused.checkpoints.mirror.remote_checkpoints import RemoteCheckpoints
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.step.checkpoint_directory import Checkpoint


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def bucket(tmp_path: Path) -> FaultyBucket:
    return FaultyBucket(tmp_path / "bucket")


@pytest.fixture
def remote(bucket: FaultyBucket) -> RemoteCheckpoints:
    return RemoteCheckpoints(bucket, PREFIX)


@pytest.fixture
def catalog(local: Path, bucket: FaultyBucket) -> Catalog:
    return Catalog(local, bucket, PREFIX)


@pytest.fixture
def step(local: Path) -> Checkpoint:
    return make_step(local, 10)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.end()
