"""Fixtures for all tests."""

import itertools
import logging
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import Emulator, emulated_bucket, emulator_server
from s3_store import s3_bucket, s3_server

# At the end, one worker would run them while the other has none left.
LONGEST = ("test_readme.py", "test_benchmarks.py", "test_examples.py", "test_installed_wheel.py")
STORE = os.environ.get("REFOCUSED_STORE", "gs")  # `s3`: what tests of a bucket use
_bucket_numbers = itertools.count(1)


def pytest_configure() -> None:
    """Restore signals that nohup and `&` in a script ignore, since programs inherit that."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, default in defaults.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Use our scheduler for `--dist loadscope`."""
    if config.getvalue("dist") != "loadscope":
        return None
    from spread import Spread

    return Spread(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first; skip those marked `gpu` on a machine without a GPU."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture
def chance() -> random.Random:
    """Random numbers that differ between runs; REFOCUSED_SEED repeats those of a failed run."""
    seed = int(os.environ.get("REFOCUSED_SEED") or time.time_ns() % 10**9)
    print(f"draws of REFOCUSED_SEED={seed}")  # pytest shows it with a failure
    return random.Random(seed)


@pytest.fixture(scope="session")
def storage_server() -> Iterator[Any]:
    with emulator_server() as server:
        yield server


@pytest.fixture
def gs_emulator(storage_server: Any) -> Iterator[Emulator]:
    """A new bucket in the emulator, behind a proxy that can inject faults."""
    with emulated_bucket(storage_server, f"refocused-test-{next(_bucket_numbers)}") as running:
        yield running


@pytest.fixture
def emulator(request: pytest.FixtureRequest) -> Emulator:
    """A new bucket on gs://, or of each store for a test marked ON_EACH."""
    found: Emulator = request.getfixturevalue(f"{getattr(request, 'param', STORE)}_emulator")
    return found


@pytest.fixture(scope="session")
def s3_storage_server() -> Iterator[Any]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3_emulator(s3_storage_server: Any) -> Iterator[Emulator]:
    """A new bucket of an S3 server, behind the same proxy."""
    with s3_bucket(s3_storage_server, f"refocused-test-{next(_bucket_numbers)}") as running:
        yield running


@pytest.fixture(autouse=True)
def _unused_logger() -> Iterator[None]:
    """Give each test our logger as no other test has set it up, so that pytest sees its records."""
    logger = logging.getLogger("refocused")
    before = logger.level, logger.propagate, logger.handlers[:]
    yield
    logger.setLevel(before[0])
    logger.propagate, logger.handlers = before[1:]
