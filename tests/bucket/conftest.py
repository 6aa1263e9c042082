from pathlib import Path

import pytest
from fakes import Emulator

from refocused.bucket.open_bucket import open_bucket
from refocused.bucket.retry import Retry
from refocused.bucket.store import Store


@pytest.fixture
def waits() -> list[float]:
    """The waits of `gcs` in seconds, recorded instead of slept."""
    return []


@pytest.fixture(params=["gs", "s3"])
def emulator(request: pytest.FixtureRequest) -> Emulator:
    """A new bucket of each store; ON_GS and ON_S3 choose one."""
    found: Emulator = request.getfixturevalue(f"{request.param}_emulator")
    return found


@pytest.fixture
def gcs(emulator: Emulator, waits: list[float]) -> Store:
    """The bucket under test, of either store."""
    policy = Retry(attempts=4, sleep=waits.append, draw=lambda: 1.0)
    opened = open_bucket(f"{emulator.url}/some/prefix", retry=policy)
    assert isinstance(opened, Store)
    return opened


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.bin"
    path.write_bytes(b"0123456789" * 100)
    return path


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 40 MiB: three chunks."""
    path = tmp_path_factory.mktemp("large") / "large.bin"
    path.write_bytes(bytes(range(256)) * (40 * 1024 * 1024 // 256))
    return path
