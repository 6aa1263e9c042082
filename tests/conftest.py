"""Fixtures that every part's tests may ask for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import Emulator, emulated_bucket, emulator_server

_bucket_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def storage_server() -> Iterator[Any]:
    with emulator_server() as server:
        yield server


@pytest.fixture
def emulator(storage_server: Any) -> Iterator[Emulator]:
    """A fresh bucket in the emulator, behind a proxy that can be told to fail."""
    with emulated_bucket(storage_server, f"refocused-test-{next(_bucket_numbers)}") as running:
        yield running
