"""Fixtures that every part's tests may ask for."""

from __future__ import annotations

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

_bucket_numbers = itertools.count(1)


def pytest_configure() -> None:
    """Undo what nohup and `&` of a script leave behind: ignored signals, which programs inherit."""
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spread tests over workers our way where `--dist loadscope` asks for it."""
    if config.getvalue("dist") != "loadscope":
        return None
    from spread import Spread

    return Spread(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the tests that are marked `gpu` out, by name, where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture
def chance() -> random.Random:
    """Draws that differ from run to run; REFOCUSED_SEED repeats those of a run that failed."""
    seed = int(os.environ.get("REFOCUSED_SEED") or time.time_ns() % 10**9)
    print(f"draws of REFOCUSED_SEED={seed}")  # pytest shows it beside a failure
    return random.Random(seed)


@pytest.fixture(scope="session")
def storage_server() -> Iterator[Any]:
    with emulator_server() as server:
        yield server


@pytest.fixture
def emulator(storage_server: Any) -> Iterator[Emulator]:
    """A fresh bucket in the emulator, behind a proxy that can be told to fail."""
    with emulated_bucket(storage_server, f"refocused-test-{next(_bucket_numbers)}") as running:
        yield running


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let records reach pytest, whatever set up our own log before."""
    logger = logging.getLogger("refocused")
    before, logger.propagate = logger.propagate, True
    yield
    logger.propagate = before
